"""What a call must bring, and what its numbers must be: clear errors before any work is done.

Shape suffixes: N rows, K candidates a row, M tokens that truncated sampling kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from titan_opd.config.objective import TOP_K_SUPPORTS, Objective
from titan_opd.losses.rows import valid_candidates, valid_ids
from titan_opd.losses.scores import TeacherScores

_SLACK = 0.01  # nats by which rounding in a scorer's bfloat16 may lift a log-probability above 0


def needed_fields(objective: Objective) -> tuple[str, ...]:
    """The fields of TeacherScores without which the objective has no meaning."""
    if objective.kind == "cross_entropy":
        return ("labels",)
    if objective.support == "dense":
        return ("hidden", "lm_head_weight", *(("labels",) if objective.kind == "hybrid" else ()))
    needed = ["ids", "logprobs"]
    if objective.kind == "policy_gradient":
        if objective.correction != "none" or objective.advantage == "rollout":
            needed.append("behavior_logprobs")
        if objective.correction == "decoupled":
            needed.append("proximal_logprobs")
    return tuple(needed)


def usable_fields(objective: Objective) -> tuple[str, ...]:
    """The fields that the objective reads where they are given."""
    optional: tuple[str, ...] = ()
    if "ids" in needed_fields(objective) and objective.kind != "hybrid":
        optional = ("valid",)
    if objective.is_divergence and objective.support in TOP_K_SUPPORTS:
        optional = ("valid", "tail_logprobs")
    if objective.kind == "policy_gradient":
        optional = ("valid", "behavior_support")
    return (*needed_fields(objective), *optional)


def check_shapes(
    hidden_NH: Tensor, lm_head_weight: Tensor, objective: Objective, scores: TeacherScores, token_weights: Tensor
) -> None:
    """Raise a ValueError for what is missing, or of a shape or type that does not fit."""
    if hidden_NH.dim() != 2 or lm_head_weight.dim() != 2 or hidden_NH.shape[1] != lm_head_weight.shape[1]:
        raise ValueError(
            f"hidden must be [N, H] and lm_head_weight [V, H], got {list(hidden_NH.shape)} and "
            f"{list(lm_head_weight.shape)}; select the rows of response tokens first"
        )
    num_rows = len(hidden_NH)
    if token_weights.shape != (num_rows,):
        raise ValueError(f"token_weights must be [N] with N = {num_rows} like hidden, got {list(token_weights.shape)}")
    for name in needed_fields(objective):
        if getattr(scores, name) is None:
            raise ValueError(
                f"TeacherScores.{name} is missing; kind = {objective.kind!r} with support = {objective.support!r}"
                + (f", correction = {objective.correction!r}" if objective.correction else "")
                + f" needs {', '.join(needed_fields(objective))}"
            )
    shape_of_ids = tuple(scores.ids.shape) if scores.ids is not None else None
    for name in usable_fields(objective):
        value = getattr(scores, name)
        if value is None or name == "lm_head_weight":
            continue
        if name == "ids":
            fits = value.dim() == 2 and len(value) == num_rows and value.shape[1] > 0
            expected = f"[{num_rows}, K]"
        elif name in ("hidden", "behavior_support"):
            fits, expected = value.dim() == 2 and len(value) == num_rows, f"[{num_rows}, ...]"
        elif name in ("tail_logprobs", "labels"):
            fits, expected = value.shape == (num_rows,), f"[{num_rows}]"
        else:
            fits, expected = value.shape == shape_of_ids, f"{list(shape_of_ids)} like ids"
        if not fits:
            raise ValueError(
                f"TeacherScores.{name} must be {expected}, one row per response token, got {list(value.shape)}"
            )
        _check_dtype(name, value)
    if objective.kind == "hybrid" and objective.support == "sampled" and scores.ids.shape[1] != 2:
        raise ValueError(
            f"TeacherScores.ids must have 2 columns for 'hybrid', the expert's token and the student's sample, got "
            f"{scores.ids.shape[1]}"
        )


def _check_dtype(name: str, value: Tensor) -> None:
    if name in ("ids", "labels", "behavior_support"):
        fits, expected = value.dtype in (torch.int32, torch.int64), "int32 or int64"
    elif name == "valid":
        fits, expected = value.dtype == torch.bool, "bool"
    else:
        fits, expected = value.is_floating_point(), "floating"
    if not fits:
        raise ValueError(f"TeacherScores.{name} must be {expected}, got {value.dtype}")


def check_values(
    objective: Objective, scores: TeacherScores, row_numbers: Tensor, vocab_size: int, staleness_N: Tensor | None
) -> None:
    """Raise a ValueError for values that cannot be right in the rows that count. One synchronisation with the host.

    Args:
        objective: what is minimised.
        scores: of the rows that count, with the fields that the objective uses.
        row_numbers: [N], which rows of the caller's these are, for messages.
        vocab_size: ids must be below it.
        staleness_N: [N], versions behind; None when no discount is asked for.
    """
    problems: list[tuple[str, Tensor]] = []  # message, [N] bool

    def report(bad: Tensor, message: str) -> None:
        problems.append((message, bad if bad.dim() == 1 else bad.any(-1)))

    if scores.ids is not None:
        valid_NK = valid_candidates(scores)
        report(
            valid_NK & ((scores.ids < 0) | (scores.ids >= vocab_size)),
            f"ids has an id outside 0 .. {vocab_size - 1}; mark padding in valid, and compare the tokenizers",
        )
        if objective.support in TOP_K_SUPPORTS:
            report(_has_duplicates(valid_ids(scores)), "ids has the same id twice; a support is a set of tokens")
        if scores.behavior_support is not None:
            report(
                valid_NK & ~_contains(scores.behavior_support, scores.ids),
                "ids has a sample that behavior_support lacks; pass every id that truncated sampling kept",
            )
        _check_logprobs(scores, valid_NK, report)
    if scores.tail_logprobs is not None:
        tail_N = scores.tail_logprobs
        report(tail_N.isnan() | (tail_N > _SLACK), "tail_logprobs is NaN or above 0; it is the log of a mass")
    if scores.labels is not None:
        report(
            (scores.labels < 0) | (scores.labels >= vocab_size),
            f"labels has an id outside 0 .. {vocab_size - 1}; give such rows the weight 0, and compare the tokenizers",
        )
    if staleness_N is not None:
        report(staleness_N < 0, "policy_versions has a version above current_version; a token cannot be of the future")
    _raise_first(problems, row_numbers)


def _check_logprobs(scores: TeacherScores, valid_NK: Tensor, report: Callable[[Tensor, str], None]) -> None:
    logprobs_NK = scores.logprobs
    report(
        valid_NK & (logprobs_NK.isnan() | (logprobs_NK > _SLACK)),
        "logprobs has NaN or a value above 0; pass natural-log probabilities over the whole vocabulary",
    )
    for name in ("behavior_logprobs", "proximal_logprobs"):
        values_NK = getattr(scores, name)
        if values_NK is not None:
            report(
                valid_NK & ~(values_NK.isfinite() & (values_NK <= _SLACK)),
                f"{name} has a value that is not finite or above 0; a sampled token has a positive probability",
            )


def _raise_first(problems: list[tuple[str, Tensor]], row_numbers: Tensor) -> None:
    if not problems or not len(row_numbers):
        return
    found = torch.stack([bad_N.any() for _, bad_N in problems]).tolist()
    for (message, bad_N), is_found in zip(problems, found, strict=True):
        if is_found:
            raise ValueError(f"row {int(row_numbers[bad_N][0])} of TeacherScores: {message}")


def _has_duplicates(ids_NK: Tensor) -> Tensor:
    """[N, K - 1] where two ids of a row are the same, padding aside."""
    sorted_NK = ids_NK.sort(-1).values
    return (sorted_NK[:, 1:] == sorted_NK[:, :-1]) & (sorted_NK[:, 1:] >= 0)


def _contains(sets_NM: Tensor, ids_NK: Tensor) -> Tensor:
    """[N, K] whether each id is in its row's set."""
    sorted_NM = sets_NM.sort(-1).values.to(ids_NK.dtype)
    position_NK = torch.searchsorted(sorted_NM, ids_NK).clamp(max=sets_NM.shape[1] - 1)
    return sorted_NM.gather(1, position_NK) == ids_NK
