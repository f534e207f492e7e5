"""The records that travel through a run: Prompt -> Sample -> Trajectory -> ScoredTrajectory -> PackedBatch.

One alignment rule: whatever has one row per response token is indexed by *that token*. Only `data/packing.py` knows
that the hidden state which predicts token i sits at position i - 1.

Shape suffixes: P prompt tokens, N response tokens, K candidates a token, m Monte Carlo samples a token, M tokens that
truncated sampling kept, T packed tokens, B packed sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from titan_opd.config.schema import SamplingConfig
from titan_opd.losses import TeacherScores


@dataclass(frozen=True, eq=False)
class Prompt:
    """A question in tokens.

    Attributes:
        id: unique in its source; what errors and journals call it.
        token_ids: [P] int64, with the chat template applied and at most one BOS.
        question: what the source says before any template, a text or chat messages; None when that is not known.
        answer: the reference that a grader compares with; None when there is nothing to grade.
        response_ids: [N] int64, an expert's whole response with its stop token, for supervised objectives.
        teacher: the route, that is which teacher scores this prompt.
        metadata: whatever else the source says.
    """

    id: str
    token_ids: Tensor
    question: str | list[dict[str, Any]] | None = None
    answer: str | None = None
    response_ids: Tensor | None = None
    teacher: str = "default"
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Sample:
    """One answer to be written: the unit that the schedule counts.

    Attributes:
        number: position in the run's stream of samples, from 0; keys the sampler's noise.
        epoch: which pass over the prompts, from 0.
        repeat: which of the prompt's `samples_per_prompt` answers, from 0.
        prompt: the question.
    """

    number: int
    epoch: int
    repeat: int
    prompt: Prompt


@dataclass(frozen=True, eq=False)
class Trajectory:
    """An answer as it was written.

    Attributes:
        sample: what was asked.
        response_ids: [N] int64, the stop token included when there is one.
        policy_versions: [N] int32, the version of the weights that wrote each token.
        finish_reason: "stop", "length", or "expert" for an answer that nobody sampled.
        sampling: the sampler's settings; None for an expert's answer that no policy has read.
        behavior_logprobs: [N] float32, of the distribution really sampled from; for an expert's answer those of the
            policy that read it, None where none did.
        behavior_support: [N, M] int64, the ids that truncated sampling kept, padded with -1; None when not truncated.
        sampled_ids, sampled_logprobs: [N, m] Monte Carlo samples at each position and their behaviour
            log-probabilities; column 0 is the token of the response itself, an expert's too.
        topk_ids, topk_logprobs: [N, K] the student's most likely tokens and their log-probabilities, normalised over
            the whole vocabulary at the sampling temperature.
        kv_versions: [N] int32, the oldest version that computed any key or value which each token's logits were
            computed from; None where that is `policy_versions` for all of them. Where it is lower, the token's
            behaviour log-probabilities are of a mixture of versions, which no single one can compute again.
    """

    sample: Sample
    response_ids: Tensor
    policy_versions: Tensor
    finish_reason: str
    sampling: SamplingConfig | None = None
    behavior_logprobs: Tensor | None = None
    behavior_support: Tensor | None = None
    sampled_ids: Tensor | None = None
    sampled_logprobs: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_logprobs: Tensor | None = None
    kv_versions: Tensor | None = None

    @property
    def prompt(self) -> Prompt:
        """What was asked."""
        return self.sample.prompt


@dataclass(frozen=True, eq=False)
class ScoredTrajectory:
    """A trajectory with its scores: row i of every tensor in `scores` belongs to response token i.

    Attributes:
        trajectory: what was written.
        scores: what the teacher says of it.
        oldest_version: tokens that an older policy version wrote are not trained.
    """

    trajectory: Trajectory
    scores: TeacherScores
    oldest_version: int = 0


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Sequences side by side without padding, ready for one forward pass.

    Attributes:
        input_ids: [T] int64.
        positions: [T] int64, from 0 within each sequence.
        cu_seqlens: [B + 1] int32, sequence b is input_ids[cu_seqlens[b] : cu_seqlens[b + 1]].
        max_seqlen: tokens of the longest sequence.
        loss_positions: [N] int64, the packed position whose hidden state predicts each response token.
        scores: TeacherScores of N rows.
        token_weights: [N] float32; 0 leaves a row out.
        policy_versions: [N] int32.
        written_ids: [N] int64, the response tokens.
        written_logprobs: [N] float32, `Trajectory.behavior_logprobs` of them; None where an answer has none.
    """

    input_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    loss_positions: Tensor
    scores: TeacherScores
    token_weights: Tensor
    policy_versions: Tensor
    written_ids: Tensor
    written_logprobs: Tensor | None = None

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with every tensor on `device`."""
        return _move(self, device, scores=_move(self.scores, device))


def _move(record: Any, device: torch.device | str, **changes: Any) -> Any:
    tensors = {name: value.to(device) for name, value in vars(record).items() if isinstance(value, Tensor)}
    return replace(record, **tensors, **changes)
