"""The learner: the student, its optimizer, and the step that changes them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_opd.config.objective import Objective
from titan_opd.config.schema import OptimizerConfig, ParallelConfig, SamplingConfig
from titan_opd.data.packing import pad_tokens
from titan_opd.data.records import PackedBatch
from titan_opd.losses import (
    DistillationOutput,
    TeacherScores,
    binding_squares,
    distillation_loss,
    m2po_bound,
    policy_logprobs,
)
from titan_opd.models import Decoder, PackedAttention
from titan_opd.observe import trace
from titan_opd.optimizer import build_optimizer, clip_gradients, learning_rate, set_learning_rate
from titan_opd.parallel import World, begin_micro_batch, own_rows, reshard, return_freed_memory, whole_tensor


class DistillationModel(nn.Module):
    """The student with the loss on top: packed tokens in, loss out. No logits leave it.

    Args:
        decoder: the student.
        vocab_size: tokens of the tokenizer; rows of the vocabulary at or above it have no probability.
        logits_chunk_mb: memory of one chunk of logits in the loss head, MiB.
    """

    def __init__(self, decoder: Decoder, *, vocab_size: int, logits_chunk_mb: float) -> None:
        super().__init__()
        self.decoder = decoder
        self.vocab_size = vocab_size
        self.logits_chunk_mb = logits_chunk_mb

    def forward(
        self,
        batch: PackedBatch,
        objective: Objective,
        *,
        num_tokens: int,
        current_version: int,
        generator: torch.Generator | None = None,
        m2po_bound: Tensor | None = None,
        read_written: bool = False,
    ) -> DistillationOutput:
        """The loss of one micro-batch, over the `num_tokens` trained tokens of the whole optimizer step.

        With `read_written` the output has the log-probabilities of the written tokens too.
        """
        weight_VH, tp_group = own_rows(self.decoder.lm_head_weight)
        return distillation_loss(
            self._response_states(batch, tp_group),
            weight_VH,
            objective,
            self._own_scores(batch.scores, tp_group),
            batch.token_weights,
            num_tokens=num_tokens,
            policy_versions=batch.policy_versions,
            current_version=current_version,
            vocab_size=self.vocab_size,
            logits_chunk_mb=self.logits_chunk_mb,
            generator=generator,
            m2po_bound=m2po_bound,
            tp_group=tp_group,
            written_ids=batch.written_ids if read_written else None,
        )

    @torch.no_grad()
    def sweep(self, batch: PackedBatch, objective: Objective, read: Callable[..., Tensor]) -> Tensor:
        """What `read`, one of the functions in titan_opd/losses/sweeps.py, finds in one micro-batch."""
        weight_VH, tp_group = own_rows(self.decoder.lm_head_weight)
        return read(
            self._response_states(batch, tp_group),
            weight_VH,
            objective,
            self._own_scores(batch.scores, tp_group),
            batch.token_weights,
            vocab_size=self.vocab_size,
            logits_chunk_mb=self.logits_chunk_mb,
            tp_group=tp_group,
        )

    def _response_states(self, batch: PackedBatch, tp_group: dist.ProcessGroup | None) -> Tensor:
        """[N, H] the hidden states that predict the response tokens."""
        if tp_group is not None:  # sequence parallelism divides the tokens
            batch = pad_tokens(batch, tp_group.size())
        attention = PackedAttention(batch.cu_seqlens, batch.max_seqlen)
        return self.decoder(batch.input_ids, batch.positions, attention)[batch.loss_positions]

    def _own_scores(self, scores: TeacherScores, tp_group: dist.ProcessGroup | None) -> TeacherScores:
        """The scores with as much of the teacher's output projection as this rank has of the student's.

        One that is spread over the ranks as the student is has no more of it (`assemble` has compared their rows).
        """
        rows = self.decoder.config.vocab_size
        if tp_group is None or scores.lm_head_weight is None or len(scores.lm_head_weight) < rows:
            return scores
        num_rows = -(-rows // tp_group.size())  # as torch.chunk cuts the student's
        end = min((tp_group.rank() + 1) * num_rows, rows)
        return replace(scores, lm_head_weight=scores.lm_head_weight[tp_group.rank() * num_rows : end])


class Learner:
    """Takes optimizer steps on packed batches, together with the other processes of `world`.

    Args:
        model: the student with its loss; trained in place, parallelised already.
        objective: what is minimised.
        config: the optimizer's settings.
        num_steps: optimizer steps of the whole run, for the learning-rate schedule.
        seed: of what an objective draws (the student's sample of a dense `hybrid`).
        world: the processes.
        parallel: when gradients cross the processes.
        sampling: how the answers were drawn; None: their log-probabilities are compared with nothing.
    """

    def __init__(
        self,
        model: DistillationModel,
        objective: Objective,
        config: OptimizerConfig,
        *,
        num_steps: int,
        seed: int,
        world: World,
        parallel: ParallelConfig | None = None,
        sampling: SamplingConfig | None = None,
    ) -> None:
        self.model = model
        self.optimizer = build_optimizer(model, config)
        self.steps_taken = 0
        self._objective = objective
        self._config = config
        self._num_steps = num_steps
        self._seed = seed
        self._world = world
        self._parallel = parallel or ParallelConfig()
        self._compares = sampling is not None and is_comparable(sampling, objective)

    def with_proximal_policy(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """The same micro-batches with the present student as the proximal policy, where the objective has one.

        To be called before the first of the optimizer steps that a policy version's answers are trained in.

        Args:
            batches: this process's micro-batches of one optimizer step, at least one.
        """
        if self._objective.correction != "decoupled":
            return list(batches)
        logprobs = self._sweep(batches, policy_logprobs)
        return [
            replace(batch, scores=replace(batch.scores, proximal_logprobs=logprobs_NK))
            for batch, logprobs_NK in zip(batches, logprobs, strict=True)
        ]

    def step(self, batches: Sequence[PackedBatch], *, current_version: int) -> dict[str, float]:
        """One optimizer step on the sum of all micro-batches' gradients.

        Every token counts the same, whichever micro-batch and process it is in: a micro-batch's loss is divided by the
        trained tokens of all of them.

        Args:
            batches: this process's micro-batches, at least one.
            current_version: the policy version that is trained.

        Returns:
            `loss`, `grad_norm`, `learning_rate`, `tokens` and the loss's metrics over the trained tokens of all
            processes; and `mismatch_metrics`.

        Raises:
            ValueError: the gradient is not finite; the weights are as they were.
        """
        counts = [int(torch.count_nonzero(batch.token_weights)) for batch in batches]
        num_tokens = int(self._world.sum(torch.tensor(sum(counts))))
        rate = learning_rate(self.steps_taken, self._num_steps, self._config)
        set_learning_rate(self.optimizer, rate)

        # Made anew from the step's number, so that a resumed run draws what the uninterrupted one would have drawn.
        entropy = np.random.SeedSequence([self._seed, self.steps_taken, self._world.dp_rank])
        generator = torch.Generator().manual_seed(int(entropy.generate_state(1, np.uint64)[0]))
        bound = self._m2po_bound(batches)
        outputs = []
        equalized = equalize(batches, self._world)
        for number, batch in enumerate(equalized, start=1):
            begin_micro_batch(self.model, self._parallel, is_last=number == len(equalized))
            with trace.span("forward-backward", tokens=len(batch.input_ids)):
                output = self.model(
                    batch.to(self._world.device),
                    self._objective,
                    num_tokens=max(num_tokens, 1),
                    current_version=current_version,
                    generator=generator,
                    m2po_bound=bound,
                    read_written=self._compares and batch.written_logprobs is not None,
                )
                output.loss.backward()
            outputs.append(output)
        grad_norm = whole_tensor(clip_gradients(self.model.parameters(), self._config.max_grad_norm)).item()
        if not math.isfinite(grad_norm):  # going on would overwrite the last good checkpoints with NaN
            raise ValueError(
                f"the gradient's norm is {grad_norm} in optimizer step {self.steps_taken + 1}, with the learning rate "
                f"{rate:.3g}; lower optimizer.learning_rate, and begin again from a checkpoint as student.path"
            )
        first_step = not self.optimizer.state
        with trace.span("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        if first_step:
            return_freed_memory()
        self.steps_taken += 1
        return {
            "loss": sum_losses(outputs, self._world),
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "tokens": num_tokens,
            **average_metrics([output.metrics for output in outputs], counts, self._world),
            **mismatch_metrics(equalized, outputs, current_version, self._world),
        }

    def _m2po_bound(self, batches: Sequence[PackedBatch]) -> Tensor | None:
        """M2PO's bound: it depends on all samples of the optimizer step, in every micro-batch of every process."""
        if self._objective.correction != "m2po":
            return None
        squares = self._world.gather_shares(torch.cat(self._sweep(batches, binding_squares)))
        return m2po_bound(torch.cat(squares), self._objective.m2_budget).to(self._world.device)

    def _sweep(self, batches: Sequence[PackedBatch], read: Callable[..., Tensor]) -> list[Tensor]:
        """`DistillationModel.sweep` of each micro-batch, on the CPU."""
        found = [
            self.model.sweep(batch.to(self._world.device), self._objective, read).cpu()
            for batch in equalize(batches, self._world)
        ]
        reshard(self.model)
        return found[: len(batches)]


def equalize(batches: Sequence[PackedBatch], world: World) -> list[PackedBatch]:
    """As many micro-batches on each process as on the one that has most, because they gather parameters together.

    What is added trains nothing: its tokens have weight 0.
    """
    assert batches, "a process without a micro-batch cannot take part in a step"
    most = int(world.max(torch.tensor(len(batches))))
    shortest = min(batches, key=lambda batch: len(batch.input_ids))
    filler = replace(shortest, token_weights=torch.zeros_like(shortest.token_weights))
    return [*batches, *[filler] * (most - len(batches))]


def sum_losses(outputs: Sequence[DistillationOutput], world: World) -> float:
    """The whole step's loss: each micro-batch's is its part of the sum already."""
    losses = torch.stack([output.loss.detach().cpu().double() for output in outputs])
    return float(world.sum(losses.sum()))


def average_metrics(metrics: Sequence[dict[str, Tensor]], counts: Sequence[int], world: World) -> dict[str, float]:
    """Metrics over all tokens from those of micro-batches: means weighted by tokens; names in "_max": the largest.

    Args:
        metrics: of this process's micro-batches; those beyond the `counts` have no token.
        counts: trained tokens of each micro-batch.
    """
    names = list(metrics[0])
    values_BM = torch.stack([torch.stack([micro[name].double() for name in names]) for micro in metrics]).cpu()
    counts_B = torch.zeros(len(metrics), dtype=torch.float64)
    counts_B[: len(counts)] = torch.tensor(counts, dtype=torch.float64)
    has_tokens_B1 = counts_B[:, None] > 0
    weighted_BM = torch.where(has_tokens_B1, values_BM * counts_B[:, None], 0.0)
    means_M = world.sum(weighted_BM.sum(0)) / world.sum(counts_B.sum()).clamp(min=1)
    largest_M = world.max(torch.where(has_tokens_B1, values_BM, -torch.inf).amax(0))
    chosen = [
        largest if name.endswith("_max") else mean
        for name, mean, largest in zip(names, means_M, largest_M, strict=True)
    ]
    return {name: float(value) for name, value in zip(names, chosen, strict=True)}


def is_comparable(sampling: SamplingConfig, objective: Objective) -> bool:
    """Whether the loss's log-probabilities are of the distribution that the answers were drawn from: the whole
    vocabulary's, at the same temperature."""
    return not sampling.truncated and sampling.temperature == objective.temperature


def mismatch_metrics(
    batches: Sequence[PackedBatch], outputs: Sequence[DistillationOutput], current_version: int, world: World
) -> dict[str, float]:
    """How far the trainer's log-probabilities of the written tokens are from those of the engine that wrote them.

    Of the trained tokens that `current_version` itself wrote: with the same weights on both sides the difference is
    rounding, or a mistake of one of them.

    Returns:
        `mismatch/mean` and `mismatch/max` of the absolute difference, in nats, over all processes; nothing where it was
        not asked for, or no token is of that version.
    """
    gaps = [torch.zeros(0)]
    for batch, output in zip(batches, outputs, strict=True):
        if output.written_logprobs is not None:
            is_fresh = (batch.policy_versions == current_version) & (batch.token_weights != 0)
            gaps.append((output.written_logprobs.cpu() - batch.written_logprobs).abs()[is_fresh].float())
    gap = torch.cat(gaps)
    total, count = world.sum(torch.tensor([gap.double().sum(), len(gap)], dtype=torch.float64)).tolist()
    if not count:
        return {}
    largest = world.max(torch.cat([gap, torch.zeros(1)]).amax())
    return {"mismatch/mean": total / count, "mismatch/max": float(largest)}


def summarize_steps(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """One record of a batch's optimizer steps: tokens add up, `_max` keeps the largest, the rate is the last, the rest
    is averaged; the mismatch is the first step's, for after it the weights are others than those that wrote."""
    names = [name for name in metrics[0] if not name.startswith("mismatch/")]
    summary = metrics[0] | {name: statistics.fmean(step[name] for step in metrics) for name in names}
    summary |= {name: max(step[name] for step in metrics) for name in summary if name.endswith("_max")}
    return summary | {"tokens": sum(step["tokens"] for step in metrics), "learning_rate": metrics[-1]["learning_rate"]}
