"""Part 2: over fresh prompts and rollouts of stale policies, the whole error of a gradient in all parameters.

Shape suffixes: N response tokens of a batch, V vocabulary, K candidates or samples, R batches, B numbers of a sketch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from titan_opd.data import Trajectory
from titan_opd.losses import Objective
from titan_opd.rollout import Recording

from .fixed_prefixes import (
    FORWARD_TOPK,
    M2PO,
    NUM_SAMPLES,
    POLICY_SAMPLED,
    POLICY_TOPK,
    REVERSE_TOPK,
    TEACHER_SAMPLED,
    dense_kind,
)
from .gradients import (
    Distributions,
    GradientSketch,
    dense_gradient,
    logit_gradient,
    next_token_logits,
    sampled_gradient,
    topk_gradient,
)
from .policies import STALENESS, PolicyChain, without_scores
from .statistics import Estimate, jackknife, relative_deviation, relative_distance, squared_norm_of_mean

FRESH_K = 4
SHIFT_FACTOR = 8  # the prefix shift is small beside the noise: it takes this many times the batches
DENSE_NAMES = {"forward_kl": "forward KL, dense", "reverse_kl": "reverse KL, dense"}


@dataclass(frozen=True)
class FreshEstimator:
    """An objective with the number of candidates or samples that it gets; 0 for a dense one."""

    name: str
    objective: Objective
    size: int = 0


DENSE = tuple(FreshEstimator(name, Objective(kind, support="dense")) for kind, name in DENSE_NAMES.items())
SPARSE = (
    FreshEstimator(f"forward KL, teacher's top {FRESH_K}", FORWARD_TOPK["bucket"], FRESH_K),
    FreshEstimator("forward KL, 1 sample of the teacher", TEACHER_SAMPLED, 1),
    FreshEstimator("forward KL, 16 samples of the teacher", TEACHER_SAMPLED, 16),
    FreshEstimator(f"reverse KL, stale top {FRESH_K}", REVERSE_TOPK["bucket"], FRESH_K),
    FreshEstimator(f"policy gradient, stale top {FRESH_K}, importance", POLICY_TOPK["rollout", "importance"], FRESH_K),
    *(
        FreshEstimator(f"policy gradient, m = {m}, importance", POLICY_SAMPLED["learner", "importance"], m)
        for m in NUM_SAMPLES
    ),
    FreshEstimator("policy gradient, m = 64, no correction", POLICY_SAMPLED["learner", "none"], 64),
    FreshEstimator("policy gradient, m = 64, PPO's clip", POLICY_SAMPLED["learner", "ppo_clip"], 64),
    FreshEstimator("policy gradient, m = 64, M2PO", M2PO, 64),
)


@dataclass
class FreshBatches:
    """Results, over the length of the expected dense gradient of the same divergence on the current policy's prefixes.

    Attributes:
        num_batches, answers_per_batch: what was drawn; for the prefix shift SHIFT_FACTOR times the batches.
        differing_answers: by s, the share of answers that the stale policy writes differently with the same noise.
        prefix_shift: by (kind, s), how far the dense gradient moves when the stale policy writes the prefixes.
        shift_ratio: by s > 0, the reverse KL's prefix shift over the forward KL's.
        bias: by (estimator's name, s), distance of the expected gradient.
        deviation: by (estimator's name, s), root of the whole variance of one batch's gradient.
    """

    num_batches: int
    answers_per_batch: int
    differing_answers: dict[int, float] = field(default_factory=dict)
    prefix_shift: dict[tuple[str, int], Estimate] = field(default_factory=dict)
    shift_ratio: dict[int, Estimate] = field(default_factory=dict)
    bias: dict[tuple[str, int], Estimate] = field(default_factory=dict)
    deviation: dict[tuple[str, int], Estimate] = field(default_factory=dict)


def measure_fresh_batches(
    chain: PolicyChain, *, num_batches: int, answers_per_batch: int, sketch: GradientSketch
) -> FreshBatches:
    """The error of one batch's gradient, over batches of fresh prompts that all policies answer.

    In float32, whose rounding is far below the noise of batches; `chain` stays so.
    """
    chain.to(torch.float32)
    size = answers_per_batch
    samples = chain.parts.prompts.take(num_batches * SHIFT_FACTOR * size)
    recorded, others = samples[: num_batches * size], samples[num_batches * size :]
    gradients: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
    answers: dict[int, list[Trajectory]] = {}
    for staleness in STALENESS:
        answers[staleness] = chain.write(staleness, recorded, Recording(max(NUM_SAMPLES), FRESH_K))
        answers[staleness] += chain.write(staleness, others, Recording())
        for number in range(num_batches * SHIFT_FACTOR):
            trajectories = answers[staleness][number * size : (number + 1) * size]
            estimators = DENSE + SPARSE if number < num_batches else DENSE
            for name, gradient_B in _gradients(chain, staleness, trajectories, estimators, sketch, number).items():
                gradients[name, staleness].append(gradient_B)
    stacked = {key: torch.stack(rows) for key, rows in gradients.items()}

    result = FreshBatches(num_batches, answers_per_batch)
    for staleness in STALENESS:
        pairs = zip(answers[staleness], answers[0], strict=True)
        differing = [not torch.equal(one.response_ids, other.response_ids) for one, other in pairs]
        result.differing_answers[staleness] = sum(differing) / len(differing)
        for estimator in DENSE + SPARSE:
            gradients_RB = stacked[estimator.name, staleness][:num_batches]
            dense_RB = stacked[DENSE_NAMES[dense_kind(estimator.objective)], 0][:num_batches]
            key = estimator.name, staleness
            result.bias[key] = relative_distance(gradients_RB - dense_RB, dense_RB)
            result.deviation[key] = relative_deviation(gradients_RB, dense_RB)
        shifts = []
        for kind, name in DENSE_NAMES.items():
            shifts += [stacked[name, staleness] - stacked[name, 0], stacked[name, 0]]
            result.prefix_shift[kind, staleness] = relative_distance(*shifts[-2:])
        if staleness:
            result.shift_ratio[staleness] = jackknife(_shift_ratio, *shifts)
    return result


def _gradients(
    chain: PolicyChain,
    staleness: int,
    trajectories: Sequence[Trajectory],
    estimators: Sequence[FreshEstimator],
    sketch: GradientSketch,
    seed: int,
) -> dict[str, Tensor]:
    """The sketch [B] of each estimator's gradient in the current student's parameters, on one batch.

    Args:
        seed: of the teacher's samples.
    """
    batch = without_scores(trajectories)
    parameters = list(chain.current.parameters())
    logits_NV = next_token_logits(chain.current, batch, chain.vocab_size)
    with torch.no_grad():
        log_q_NV, log_behavior_NV = (
            next_token_logits(decoder, batch, chain.vocab_size).log_softmax(-1)
            for decoder in (chain.teacher, chain.policies[staleness])
        )
    rows = Distributions(logits_NV.detach().log_softmax(-1), log_q_NV, log_behavior_NV)

    def in_logits(objective: Objective, size: int) -> Tensor:
        if objective is TEACHER_SAMPLED:
            return sampled_gradient(objective, rows, size, seed)
        match objective.support:
            case "dense":
                return dense_gradient(objective.kind, rows)
            case "teacher_topk":
                return topk_gradient(objective, rows, size)
            case "student_topk":
                ids_NK = torch.cat([trajectory.topk_ids for trajectory in trajectories])
            case "sampled":
                ids_NK = torch.cat([trajectory.sampled_ids for trajectory in trajectories])
        return logit_gradient(objective, rows.log_p, rows.scores(ids_NK[:, :size]))

    sketches = {}
    for estimator in estimators:
        gradient_NV = in_logits(estimator.objective, estimator.size)
        pieces = torch.autograd.grad(logits_NV, parameters, gradient_NV, retain_graph=True)
        sketches[estimator.name] = sketch(parameters_to_vector(pieces))
    return sketches


def _shift_ratio(forward_RB: Tensor, forward_dense_RB: Tensor, reverse_RB: Tensor, reverse_dense_RB: Tensor) -> Tensor:
    """The reverse KL's relative shift over the forward KL's; 0 where a square comes out below 0."""
    forward = squared_norm_of_mean(forward_RB) / squared_norm_of_mean(forward_dense_RB)
    reverse = squared_norm_of_mean(reverse_RB) / squared_norm_of_mean(reverse_dense_RB)
    return (reverse / forward).clamp(min=0).sqrt()
