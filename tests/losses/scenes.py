"""Small random students and teachers, with whatever scores an objective needs, for every objective there is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from titan_opd.config.objective import TOP_K_SUPPORTS
from titan_opd.losses import DistillationOutput, Objective, TeacherScores, distillation_loss
from titan_opd.losses.reference import reference_per_token

F_DIVERGENCES = (
    {"kind": "forward_kl"},
    {"kind": "reverse_kl"},
    {"kind": "mixed_kl", "alpha": 0.3},
    {"kind": "jsd", "beta": 0.2},
    {"kind": "skew_forward_kl", "alpha": 0.1},
    {"kind": "skew_reverse_kl", "alpha": 0.1},
    {"kind": "total_variation"},
)
SPARSE_DIVERGENCES = (*F_DIVERGENCES, {"kind": "alpha_beta", "alpha": 0.6, "beta": 0.3})
CORRECTIONS = (
    {"correction": "none"},
    {"correction": "importance"},
    {"correction": "truncated", "cap": 1.5},
    {"correction": "masked", "band": (0.5, 2.0)},
    {"correction": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
    {"correction": "ppo_clip", "dual_clip": 3.0},
    {"correction": "decoupled", "cap": 5.0},
    {"correction": "m2po", "m2_budget": 0.02},
)


def _all_objectives() -> dict[str, Objective]:
    objectives = [
        *(
            Objective(**kind, support=support, tail=tail)
            for kind in SPARSE_DIVERGENCES
            for support in TOP_K_SUPPORTS
            for tail in ("bucket", "renormalize", "drop")
        ),
        *(Objective(**kind, support="dense") for kind in SPARSE_DIVERGENCES),
        Objective("adaptive_kl"),
        Objective("mc_forward_kl"),
        *(
            Objective("policy_gradient", support=support, advantage=advantage, **correction)
            for support in ("sampled", "student_topk")
            for advantage in ("learner", "rollout")
            for correction in CORRECTIONS
        ),
        Objective("hybrid"),
        Objective("hybrid", support="dense"),
        Objective("cross_entropy"),
    ]
    return {_name(objective): objective for objective in objectives}


def _name(objective: Objective) -> str:
    parts = (objective.kind, objective.support, objective.tail, objective.advantage, objective.correction)
    dual = "dual" if objective.dual_clip else None
    return "-".join(part for part in (*parts, dual) if part)


OBJECTIVES = _all_objectives()


@dataclass(frozen=True)
class Scene:
    """A student, a teacher and their scores: everything `distillation_loss` wants."""

    objective: Objective
    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    scores: TeacherScores
    token_weights: Tensor  # [N]

    def loss(self, hidden: Tensor | None = None, weight: Tensor | None = None, **options) -> DistillationOutput:
        # The dense hybrid draws from this generator: the same draws in every call.
        options.setdefault("generator", torch.Generator(self.hidden.device).manual_seed(5))
        return distillation_loss(
            self.hidden if hidden is None else hidden,
            self.weight if weight is None else weight,
            self.objective,
            self.scores,
            self.token_weights,
            **options,
        )

    def gradients(self, **options) -> tuple[DistillationOutput, Tensor, Tensor]:
        """The output, and the loss's gradients in the hidden states and the output projection."""
        hidden, weight = self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()
        output = self.loss(hidden, weight, **options)
        output.loss.backward()
        return output, hidden.grad, weight.grad

    def rows(self, rows: slice | Tensor) -> Scene:
        return replace(self, hidden=self.hidden[rows], scores=self.scores[rows], token_weights=self.token_weights[rows])

    def with_scores(self, **fields) -> Scene:
        return replace(self, scores=replace(self.scores, **fields))

    def to(self, dtype: torch.dtype) -> Scene:
        """The models in another precision; scores stay in theirs, except what a model computes."""
        scores = self.scores
        if scores.hidden is not None:
            scores = replace(scores, hidden=scores.hidden.to(dtype), lm_head_weight=scores.lm_head_weight.to(dtype))
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype), scores=scores)

    def reference(self) -> Tensor:
        """[N] the values by the reference on full logits; not for the dense hybrid, which draws."""
        teacher_logits = None
        if self.objective.support == "dense":
            teacher_logits = self.scores.hidden @ self.scores.lm_head_weight.T
        return reference_per_token(
            self.hidden @ self.weight.T, self.objective, self.scores, teacher_logits_NV=teacher_logits
        )


def build_scene(
    objective: Objective,
    *,
    seed: int = 0,
    num_rows: int = 6,
    vocab: int = 19,
    hidden_size: int = 5,
    num_candidates: int = 4,
    scale: float = 1.5,
    teacher_is_student: bool = False,
) -> Scene:
    """Random models of float64 with logits of about +-`scale` * sqrt(hidden_size) and an older student that sampled.

    Args:
        teacher_is_student: the teacher has the student's weights, and the older student too.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight = normal(num_rows, hidden_size), scale * normal(vocab, hidden_size)
    teacher_hidden, teacher_weight = normal(num_rows, hidden_size), scale * normal(vocab, hidden_size)
    drift = 0.3 * normal(num_rows, vocab)
    if teacher_is_student:
        teacher_hidden, teacher_weight, drift = hidden, weight, torch.zeros_like(drift)
    temperature = objective.temperature
    log_q = (teacher_hidden @ teacher_weight.T / temperature).log_softmax(-1)
    log_old = (hidden @ weight.T / temperature + drift).log_softmax(-1)
    log_proximal = (hidden @ weight.T / temperature + drift / 2).log_softmax(-1)

    fields: dict[str, Tensor] = {}
    labels = torch.randint(vocab, (num_rows,), generator=generator)
    if objective.kind == "cross_entropy":
        fields["labels"] = labels
    elif objective.support == "dense":
        fields = {"hidden": teacher_hidden, "lm_head_weight": teacher_weight}
        if objective.kind == "hybrid":
            fields["labels"] = labels
    else:
        if objective.support == "teacher_topk":
            ids = log_q.topk(num_candidates).indices
        elif objective.support == "student_topk":
            ids = log_old.topk(num_candidates).indices
        else:
            count = 2 if objective.kind == "hybrid" else num_candidates
            sampler = log_q if objective.kind == "mc_forward_kl" else log_old
            ids = torch.multinomial(sampler.exp(), count, replacement=True, generator=generator)
        outside = torch.ones_like(log_q, dtype=torch.bool).scatter(1, ids, False)
        fields = {
            "ids": ids,
            "logprobs": log_q.gather(1, ids),
            "tail_logprobs": log_q.masked_fill(~outside, -torch.inf).logsumexp(-1),
            "behavior_logprobs": log_old.gather(1, ids),
            "proximal_logprobs": log_proximal.gather(1, ids),
        }
    token_weights = 0.5 + torch.rand(num_rows, generator=generator, dtype=torch.float64)
    return Scene(objective, hidden, weight, TeacherScores(**fields), token_weights)
