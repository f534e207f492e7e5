"""The native teacher: one packed forward pass scores whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from titan_opd.config.objective import Objective
from titan_opd.data.packing import pack_microbatch, plan_microbatches
from titan_opd.data.records import PackedBatch, ScoredTrajectory, Trajectory
from titan_opd.losses import TeacherScores
from titan_opd.losses.vocab_parallel import VocabShard
from titan_opd.ops.noise import uniforms
from titan_opd.parallel import World, reshard
from titan_opd.teacher.model import TeacherModel
from titan_opd.teacher.projection import score_ids, score_samples, score_topk


class NativeScorer:
    """Scores trajectories with a decoder in this process, or together with the processes that share it.

    Prompt and answer go through the decoder once, packed; the vocabulary projection runs in chunks of rows, on response
    positions only.

    Args:
        model: the teacher.
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
        world: the processes that the teacher is spread over, which score together; None: it is whole here.
    """

    def __init__(
        self,
        model: TeacherModel,
        objective: Objective,
        *,
        vocab_size: int,
        top_k: int,
        tokens_per_forward: int,
        logits_chunk_mb: float,
        num_samples: int = 1,
        seed: int = 0,
        fixed_shapes: bool = False,
        world: World | None = None,
    ) -> None:
        self.model = model
        self.objective = objective
        self.vocab_size = vocab_size
        self._top_k = min(top_k, vocab_size)
        self._tokens_per_forward = tokens_per_forward
        self._logits_chunk_mb = logits_chunk_mb
        self._num_samples = num_samples
        self._seed = seed
        self._fixed_shapes = fixed_shapes
        self._world = world
        self._device = model.decoder.lm_head_weight.device if world is None else world.device
        self._dense_weight: Tensor | None = None

    @torch.no_grad()
    def score(self, trajectories: Sequence[Trajectory]) -> list[ScoredTrajectory]:
        """Scores for every response token, in the order of `trajectories`."""
        unscored = [ScoredTrajectory(trajectory, TeacherScores()) for trajectory in trajectories]
        scored = list(unscored)
        plan = plan_microbatches(trajectories, self._tokens_per_forward, option="teacher.tokens_per_forward")
        if self._fixed_shapes:
            plan = [[i] for members in plan for i in members]
        missing = 0
        if self._world is not None:
            assert plan, "a process without an answer cannot take part in scoring"
            missing = int(self._world.max(torch.tensor(len(plan)))) - len(plan)
        for members in plan:
            batch, packed = pack_microbatch([unscored[i] for i in members]), [trajectories[i] for i in members]
            for i, rows in zip(members, self._forward(batch, packed), strict=True):
                scored[i] = ScoredTrajectory(trajectories[i], rows)
        for _ in range(missing):  # parameters are gathered together, so all processes make as many passes
            self._forward(batch, packed)
        if self._world is not None:
            reshard(self.model)
        return scored

    def _forward(self, batch: PackedBatch, trajectories: Sequence[Trajectory]) -> list[TeacherScores]:
        """The scores of each of the trajectories that `batch` packs."""
        read = partial(self._read, trajectories)
        return self.model(batch.to(self._device), self.vocab_size, read)

    def _read(self, trajectories: Sequence[Trajectory], hidden_NH: Tensor, shard: VocabShard) -> list[TeacherScores]:
        """The scores of each trajectory from the hidden states of all their response tokens."""
        lengths = [len(trajectory.response_ids) for trajectory in trajectories]
        projection = {"temperature": self.objective.temperature, "logits_chunk_mb": self._logits_chunk_mb}
        support = self.objective.support
        if support == "dense":
            return self._dense_scores(trajectories, hidden_NH.split(lengths), shard)
        if support == "teacher_topk":
            return _split(score_topk(hidden_NH, shard, self._top_k, **projection), lengths)
        if self.objective.kind == "mc_forward_kl":
            uniforms_Nm = self._uniforms(trajectories).to(self._device)
            return _split(score_samples(hidden_NH, shard, uniforms_Nm, **projection), lengths)
        candidates = [student_candidates(trajectory, support) for trajectory in trajectories]
        ids_NK = torch.cat([ids for ids, _ in candidates]).to(self._device)
        scores = _split(score_ids(hidden_NH, shard, ids_NK, **projection), lengths)
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

    def _dense_scores(
        self, trajectories: Sequence[Trajectory], hidden: Sequence[Tensor], shard: VocabShard
    ) -> list[TeacherScores]:
        """Hidden states, from which the loss computes logits anew; for a hybrid the expert's tokens too."""
        is_hybrid = self.objective.kind == "hybrid"
        if self._dense_weight is None:  # what FSDP has gathered is freed after the pass, and the loss reads it later
            self._dense_weight = shard.weight if self._world is None else shard.weight.clone()
        return [
            TeacherScores(
                hidden=rows_NH,
                lm_head_weight=self._dense_weight,
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
