"""What a call must bring, and what its numbers must be: clear errors before any work is done.

Shape suffixes: N rows, K candidates a row, M tokens that truncated sampling kept.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    for name in usable_fields(objective):
        value = getattr(scores, name)
        if value is not None and name != "lm_head_weight":
            _check_rows(name, value, num_rows, scores.ids)
            _check_dtype(name, value)
    if objective.support == "dense" and scores.hidden.shape[1:] != scores.lm_head_weight.shape[1:]:
        raise ValueError(
            f"TeacherScores.hidden and lm_head_weight must be [N, H] and [V, H] of one model, got "
            f"{list(scores.hidden.shape)} and {list(scores.lm_head_weight.shape)}"
        )
    if objective.kind == "hybrid" and objective.support == "sampled" and scores.ids.shape[1] != 2:
        raise ValueError(
            f"TeacherScores.ids must have 2 columns for 'hybrid', the expert's token and the student's sample, got "
            f"{scores.ids.shape[1]}"
        )


def _check_rows(name: str, value: Tensor, num_rows: int, ids_NK: Tensor | None) -> None:
    if name in ("tail_logprobs", "labels"):
        fits, expected = value.shape == (num_rows,), f"[{num_rows}]"
    elif name == "ids":
        fits, expected = value.dim() == 2 and len(value) == num_rows and value.shape[1] > 0, f"[{num_rows}, K]"
    elif name in ("hidden", "behavior_support"):
        fits, expected = value.dim() == 2 and len(value) == num_rows, f"[{num_rows}, ...]"
    else:
        fits, expected = value.shape == ids_NK.shape, f"{list(ids_NK.shape)} like ids"
    if not fits:
        raise ValueError(
            f"TeacherScores.{name} must be {expected}, one row per response token, got {list(value.shape)}"
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
    objective: Objective,
    scores: TeacherScores,
    weights_N: Tensor,
    staleness_N: Tensor | None,
    *,
    vocab_size: int,
    row_numbers_N: Tensor,
) -> None:
    """Raise a ValueError for values that cannot be right in the rows that count. One synchronisation with the host.

    Args:
        objective: what is minimised.
        scores: of the rows that count, with the fields that the objective uses.
        weights_N: [N], of these rows.
        staleness_N: [N], versions behind; None when no discount is asked for.
        vocab_size: ids must be below it.
        row_numbers_N: [N], which rows of the caller's these are, for messages.
    """
    problems = [("token_weights is not finite", ~weights_N.isfinite())]  # message, [N] bool
    if staleness_N is not None:
        problems.append(("policy_versions is above current_version; no token is of the future", staleness_N < 0))
    if scores.ids is not None:
        problems += _problems_of_candidates(objective, scores, vocab_size)
    if scores.tail_logprobs is not None:
        tail_N = scores.tail_logprobs
        is_bad_N = tail_N.isnan() | (tail_N > _SLACK)
        problems.append(("TeacherScores.tail_logprobs is NaN or above 0; it is the log of a mass", is_bad_N))
    if scores.labels is not None:
        message = f"TeacherScores.labels is outside 0 .. {vocab_size - 1}; give padding the weight 0"
        problems.append((message, (scores.labels < 0) | (scores.labels >= vocab_size)))
    _raise_first(problems, row_numbers_N)


def _problems_of_candidates(
    objective: Objective, scores: TeacherScores, vocab_size: int
) -> Iterator[tuple[str, Tensor]]:
    """Messages and the rows [N] that they would be about."""
    valid_NK, kept_NM = valid_candidates(scores), scores.behavior_support
    outside_NK = valid_NK & ((scores.ids < 0) | (scores.ids >= vocab_size))
    yield (
        f"TeacherScores.ids is outside 0 .. {vocab_size - 1}; mark padding in `valid`, compare the tokenizers",
        outside_NK.any(-1),
    )
    if objective.support in TOP_K_SUPPORTS:
        twice_N = _has_duplicates(valid_ids(scores))
        yield "TeacherScores.ids has the same id twice; a support is a set of tokens", twice_N
    if kept_NM is not None:
        yield (
            f"TeacherScores.behavior_support is above {vocab_size - 1}; compare the tokenizers",
            (kept_NM >= vocab_size).any(-1),
        )
        lacks_NK = valid_NK & ~_contains(kept_NM, scores.ids)
        yield (
            "TeacherScores.behavior_support lacks a sample of `ids`; pass every id that truncated sampling kept",
            lacks_NK.any(-1),
        )
    wrong_NK = valid_NK & (scores.logprobs.isnan() | (scores.logprobs > _SLACK))
    yield (
        "TeacherScores.logprobs is NaN or above 0; pass natural logarithms over the whole vocabulary",
        wrong_NK.any(-1),
    )
    for name in ("behavior_logprobs", "proximal_logprobs"):
        values_NK = getattr(scores, name)
        if values_NK is not None:
            wrong_NK = valid_NK & ~(values_NK.isfinite() & (values_NK <= _SLACK))
            yield f"TeacherScores.{name} is not finite or above 0; what was sampled had a probability", wrong_NK.any(-1)


def _raise_first(problems: list[tuple[str, Tensor]], row_numbers_N: Tensor) -> None:
    found = torch.stack([rows_N.any() for _, rows_N in problems]).tolist()
    for (message, rows_N), is_found in zip(problems, found, strict=True):
        if is_found:
            raise ValueError(f"row {int(row_numbers_N[rows_N][0])}: {message}")


def _has_duplicates(ids_NK: Tensor) -> Tensor:
    """[N] whether two ids of a row are the same, padding aside."""
    sorted_NK = ids_NK.sort(-1).values
    return ((sorted_NK[:, 1:] == sorted_NK[:, :-1]) & (sorted_NK[:, 1:] >= 0)).any(-1)


def _contains(sets_NM: Tensor, ids_NK: Tensor) -> Tensor:
    """[N, K] whether each id is in its row's set."""
    sorted_NM = sets_NM.sort(-1).values.to(ids_NK.dtype)
    position_NK = torch.searchsorted(sorted_NM, ids_NK).clamp(max=sets_NM.shape[1] - 1)
    return sorted_NM.gather(1, position_NK) == ids_NK
