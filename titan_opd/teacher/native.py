"""The native teacher: one packed forward pass scores whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from titan_opd.config.objective import Objective
from titan_opd.data.packing import pack_microbatch, plan_microbatches
from titan_opd.data.records import ScoredTrajectory, Trajectory
from titan_opd.losses import TeacherScores
from titan_opd.models import Decoder, PackedAttention
from titan_opd.ops.noise import uniforms
from titan_opd.teacher.projection import score_ids, score_samples, score_topk


class NativeScorer:
    """Scores trajectories with a decoder in this process.

    Prompt and answer go through the decoder once, packed; the vocabulary projection runs in chunks of rows, on response
    positions only.

    Args:
        decoder: the teacher.
        objective: decides what is scored, and at which temperature.
        vocab_size: tokens of the tokenizer; rows of the vocabulary at or above it have no probability.
        top_k: candidates a token for the support "teacher_topk".
        tokens_per_forward: most packed tokens of one forward pass.
        logits_chunk_mb: memory of one chunk of logits, MiB.
        num_samples: the teacher's own draws at each token for "mc_forward_kl".
        seed: of these draws. A draw is a function of it, of the sample's number and of the token's position: it does
            not depend on what else is scored.
        fixed_shapes: score every trajectory in a forward pass of its own, so that its scores depend on nothing else,
            to the bit, however trajectories are grouped in calls. Costs the gain of packing: a product with the
            weights for each answer instead of one for `tokens_per_forward` tokens.
    """

    def __init__(
        self,
        decoder: Decoder,
        objective: Objective,
        *,
        vocab_size: int,
        top_k: int,
        tokens_per_forward: int,
        logits_chunk_mb: float,
        num_samples: int = 1,
        seed: int = 0,
        fixed_shapes: bool = False,
    ) -> None:
        self.decoder = decoder.eval().requires_grad_(False)
        self.objective = objective
        self.vocab_size = vocab_size
        self._top_k = min(top_k, vocab_size)
        self._tokens_per_forward = tokens_per_forward
        self._logits_chunk_mb = logits_chunk_mb
        self._num_samples = num_samples
        self._seed = seed
        self._fixed_shapes = fixed_shapes
        self._device = decoder.lm_head_weight.device

    @torch.no_grad()
    def score(self, trajectories: Sequence[Trajectory]) -> list[ScoredTrajectory]:
        """Scores for every response token, in the order of `trajectories`."""
        unscored = [ScoredTrajectory(trajectory, TeacherScores()) for trajectory in trajectories]
        scored = list(unscored)
        plan = plan_microbatches(trajectories, self._tokens_per_forward, option="teacher.tokens_per_forward")
        if self._fixed_shapes:
            plan = [[i] for members in plan for i in members]
        for members in plan:
            batch = pack_microbatch([unscored[i] for i in members]).to(self._device)
            attention = PackedAttention(batch.cu_seqlens, batch.max_seqlen)
            hidden_TH = self.decoder(batch.input_ids, batch.positions, attention)
            scores = self._score([trajectories[i] for i in members], hidden_TH[batch.loss_positions])
            for i, rows in zip(members, scores, strict=True):
                scored[i] = ScoredTrajectory(trajectories[i], rows)
        return scored

    def _score(self, trajectories: Sequence[Trajectory], hidden_NH: Tensor) -> list[TeacherScores]:
        """The scores of each trajectory from the hidden states of all their response tokens."""
        lengths = [len(trajectory.response_ids) for trajectory in trajectories]
        projection = {
            "temperature": self.objective.temperature,
            "vocab_size": self.vocab_size,
            "logits_chunk_mb": self._logits_chunk_mb,
        }
        weight_VH = self.decoder.lm_head_weight
        support = self.objective.support
        if support == "dense":
            return self._dense_scores(trajectories, hidden_NH.split(lengths))
        if support == "teacher_topk":
            return _split(score_topk(hidden_NH, weight_VH, self._top_k, **projection), lengths)
        if self.objective.kind == "mc_forward_kl":
            uniforms_Nm = self._uniforms(trajectories).to(self._device)
            return _split(score_samples(hidden_NH, weight_VH, uniforms_Nm, **projection), lengths)
        candidates = [student_candidates(trajectory, support) for trajectory in trajectories]
        ids_NK = torch.cat([ids for ids, _ in candidates]).to(self._device)
        scores = _split(score_ids(hidden_NH, weight_VH, ids_NK, **projection), lengths)
        return [
            replace(rows, behavior_logprobs=logprobs, behavior_support=trajectory.behavior_support)
            for rows, (_, logprobs), trajectory in zip(scores, candidates, trajectories, strict=True)
        ]

    def _uniforms(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """[N, m] what decides the draws at each token of all answers."""
        rows = []
        for trajectory in trajectories:
            positions_N = torch.arange(len(trajectory.response_ids))
            numbers_N = torch.full_like(positions_N, trajectory.sample.number)
            rows.append(uniforms(self._seed, numbers_N, positions_N, self._num_samples))
        return torch.cat(rows)

    def _dense_scores(self, trajectories: Sequence[Trajectory], hidden: Sequence[Tensor]) -> list[TeacherScores]:
        """Hidden states, from which the loss computes logits anew; for a hybrid the expert's tokens too."""
        is_hybrid = self.objective.kind == "hybrid"
        return [
            TeacherScores(
                hidden=rows_NH,
                lm_head_weight=self.decoder.lm_head_weight,
                labels=trajectory.response_ids if is_hybrid else None,
            )
            for rows_NH, trajectory in zip(hidden, trajectories, strict=True)
        ]


def student_candidates(trajectory: Trajectory, support: str) -> tuple[Tensor, Tensor]:
    """The ids [N, K] at each position, and the student's log-probabilities of them when it wrote or read the answer."""
    if support == "student_topk":
        assert trajectory.topk_ids is not None, "the engine was not asked for the student's top-k"
        return trajectory.topk_ids, trajectory.topk_logprobs
    if trajectory.sampled_ids is not None:
        return trajectory.sampled_ids, trajectory.sampled_logprobs
    return trajectory.response_ids[:, None], trajectory.behavior_logprobs[:, None]


def _split(scores: TeacherScores, lengths: list[int]) -> list[TeacherScores]:
    """Scores of several trajectories, row after row, as one TeacherScores each."""
    columns = (x.cpu().split(lengths) for x in (scores.ids, scores.logprobs, scores.tail_logprobs))
    return [
        TeacherScores(ids=ids, logprobs=logprobs, tail_logprobs=tail)
        for ids, logprobs, tail in zip(*columns, strict=True)
    ]
