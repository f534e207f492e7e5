"""Scored answers, side by side without padding: the micro-batches of a step.

The one place that knows which hidden state predicts which token. The hidden state at position i - 1 predicts token i,
so for a prompt of P tokens and a response of N

    token       p_1 ... p_P  r_1 ... r_N
    input       p_1 ... p_P  r_1 ... r_(N-1)         P + N - 1 tokens: r_N predicts nothing that is trained
    loss rows           ^    ^       ^               N of them, at input positions P - 1 ... P + N - 2
    predicts            r_1  r_2 ... r_N

Shape suffixes: P prompt tokens, N response tokens, K candidates a token, M tokens that truncated sampling kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from titan_opd.data.records import PackedBatch, ScoredTrajectory, Trajectory
from titan_opd.losses import TeacherScores

# What stands in the columns that a row with fewer candidates than its neighbours does not have. Ids of -1 are no
# token; the log-probabilities are finite so that nothing can turn into NaN before `valid` masks them.
_RAGGED_FIELDS = {"ids": -1, "logprobs": 0.0, "behavior_logprobs": 0.0, "proximal_logprobs": 0.0}
_ROW_FIELDS = ("tail_logprobs", "hidden", "labels")


def pack(scored: Sequence[ScoredTrajectory], tokens_per_microbatch: int) -> list[PackedBatch]:
    """Micro-batches of at most `tokens_per_microbatch` input tokens that hold every response token exactly once.

    No sequence is split. An answer of zero tokens has nothing to train and is left out. The result depends on the
    order of `scored` and on lengths only.

    Raises:
        ValueError: when one sequence alone is longer than a micro-batch, when scores have not one row per response
            token, or when answers differ in which scores they have.
    """
    trajectories = [one.trajectory for one in scored]
    plan = plan_microbatches(trajectories, tokens_per_microbatch, option="training.tokens_per_microbatch")
    return [pack_microbatch([scored[i] for i in members]) for members in plan]


def plan_microbatches(trajectories: Sequence[Trajectory], capacity: int, *, option: str) -> list[list[int]]:
    """Which trajectories, by index, go together into micro-batches of at most `capacity` input tokens.

    Args:
        trajectories: those with an empty answer are in no micro-batch.
        capacity: input tokens.
        option: the name of the setting that `capacity` came from, for messages.

    Raises:
        ValueError: when one sequence alone is longer than `capacity`, or has no prompt.
    """
    trained = [i for i, trajectory in enumerate(trajectories) if len(trajectory.response_ids)]
    for i in trained:
        _check_length(trajectories[i], capacity, option)
    bins = _first_fit_decreasing([num_inputs(trajectories[i]) for i in trained], capacity)
    return [[trained[member] for member in members] for members in bins]


def num_inputs(trajectory: Trajectory) -> int:
    """Tokens that the model reads of a prompt and its answer."""
    return len(trajectory.prompt.token_ids) + len(trajectory.response_ids) - 1


def _check_length(trajectory: Trajectory, capacity: int, option: str) -> None:
    prompt = trajectory.prompt
    if not len(prompt.token_ids):
        raise ValueError(f"prompt {prompt.id!r} has no token, so nothing predicts the first token of its answer")
    if num_inputs(trajectory) > capacity:
        raise ValueError(
            f"prompt {prompt.id!r} and its answer have {num_inputs(trajectory)} input tokens, more than "
            f"{option} = {capacity}; raise that, or lower rollout.sampling.max_new_tokens or data.max_prompt_tokens"
        )


def _check_rows(one: ScoredTrajectory) -> None:
    prompt, num_rows = one.trajectory.prompt, len(one.trajectory.response_ids)
    assert len(one.trajectory.policy_versions) == num_rows
    for name in (*_RAGGED_FIELDS, *_ROW_FIELDS, "behavior_support", "valid"):
        rows = getattr(one.scores, name)
        if rows is not None and len(rows) != num_rows:
            raise ValueError(
                f"scores.{name} of prompt {prompt.id!r} has {len(rows)} rows for {num_rows} response tokens; "
                "scores need one row for each response token, in order"
            )
    for name in ("logprobs", "behavior_logprobs", "proximal_logprobs", "valid"):
        values, ids_NK = getattr(one.scores, name), one.scores.ids
        if values is not None and (ids_NK is None or values.shape != ids_NK.shape):
            raise ValueError(
                f"scores.{name} of prompt {prompt.id!r} has the shape {tuple(values.shape)} and scores.ids "
                f"{None if ids_NK is None else tuple(ids_NK.shape)}; both need one column for each candidate"
            )


def _first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `capacity`: the longest first, each into the first bin with room.

    Needs at most 11/9 of the least number of bins, plus 6/9 (Dósa 2007).
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((b for b, free in enumerate(room) if lengths[i] <= free), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(capacity)
        bins[place].append(i)
        room[place] -= lengths[i]
    return [sorted(members) for members in bins]


def pack_microbatch(scored: Sequence[ScoredTrajectory]) -> PackedBatch:
    """One micro-batch of exactly these answers, in this order; none of them empty.

    Raises:
        ValueError: when scores have not one row per response token, or answers differ in which scores they have.
    """
    for one in scored:
        _check_rows(one)
    trajectories = [one.trajectory for one in scored]
    lengths = [num_inputs(trajectory) for trajectory in trajectories]
    starts = list(accumulate(lengths, initial=0))
    inputs, loss_positions = [], []
    for trajectory, start in zip(trajectories, starts, strict=False):  # `starts` ends with the total
        prompt_ids, response_ids = trajectory.prompt.token_ids, trajectory.response_ids
        inputs += [prompt_ids, response_ids[:-1]]
        first_row = start + len(prompt_ids) - 1
        loss_positions.append(torch.arange(first_row, first_row + len(response_ids)))
    loss_positions_N = torch.cat(loss_positions)
    return PackedBatch(
        input_ids=torch.cat(inputs),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        max_seqlen=max(lengths),
        loss_positions=loss_positions_N,
        scores=_concatenate_scores(scored),
        token_weights=torch.cat([(one.trajectory.policy_versions >= one.oldest_version).float() for one in scored]),
        policy_versions=torch.cat([trajectory.policy_versions for trajectory in trajectories]),
        written_ids=torch.cat([trajectory.response_ids for trajectory in trajectories]),
        written_logprobs=_written_logprobs(trajectories),
    )


def _written_logprobs(trajectories: Sequence[Trajectory]) -> Tensor | None:
    rows = [trajectory.behavior_logprobs for trajectory in trajectories]
    return None if any(row is None for row in rows) else torch.cat(rows)


def _concatenate_scores(scored: Sequence[ScoredTrajectory]) -> TeacherScores:
    fields: dict[str, Tensor | None] = {}
    for name, filler in _RAGGED_FIELDS.items():
        fields[name] = _concatenate(scored, name, filler)
    for name in _ROW_FIELDS:
        fields[name] = _concatenate(scored, name)
    fields["behavior_support"] = _concatenate(scored, "behavior_support", -1)
    fields["valid"] = _concatenate_valid(scored)
    fields["lm_head_weight"] = _shared_head(scored)
    return TeacherScores(**fields)


def _concatenate(scored: Sequence[ScoredTrajectory], name: str, filler: float | None = None) -> Tensor | None:
    """The rows of one field; with a filler, rows [N, K] of different K are padded with it to the widest."""
    rows = [getattr(one.scores, name) for one in scored]
    missing = [one.trajectory.prompt.id for one, row in zip(scored, rows, strict=True) if row is None]
    if len(missing) == len(rows):
        return None
    if missing:
        raise ValueError(
            f"scores.{name} is missing for the answer to prompt {missing[0]!r} and {len(missing) - 1} others, while "
            "other answers of the batch have it; score all answers of a batch for the same objective"
        )
    if filler is not None:
        width = max(row.shape[1] for row in rows)
        rows = [pad(row, (0, width - row.shape[1]), value=filler) for row in rows]
    return torch.cat(rows)


def _concatenate_valid(scored: Sequence[ScoredTrajectory]) -> Tensor | None:
    """[N, K], or None when all candidates of all rows count."""
    if scored[0].scores.ids is None:
        return None
    widths = {one.scores.ids.shape[1] for one in scored}
    if len(widths) == 1 and all(one.scores.valid is None for one in scored):
        return None
    rows = []
    for one in scored:
        valid_NK = torch.ones_like(one.scores.ids, dtype=torch.bool) if one.scores.valid is None else one.scores.valid
        rows.append(pad(valid_NK, (0, max(widths) - valid_NK.shape[1]), value=False))
    return torch.cat(rows)


def _shared_head(scored: Sequence[ScoredTrajectory]) -> Tensor | None:
    heads = {id(one.scores.lm_head_weight): one.scores.lm_head_weight for one in scored}
    if len(heads) > 1:
        raise ValueError(
            "answers of one batch were scored with different scores.lm_head_weight; a batch has one teacher's head: "
            "pass the same tensor with all of its answers"
        )
    return next(iter(heads.values()))


def pad_tokens(batch: PackedBatch, multiple: int) -> PackedBatch:
    """The batch with one more sequence of a few tokens, which train nothing, so that `multiple` divides its tokens."""
    missing = -len(batch.input_ids) % multiple
    if missing == 0:
        return batch
    padding = torch.arange(missing, device=batch.positions.device)
    return replace(
        batch,
        input_ids=pad(batch.input_ids, (0, missing)),
        positions=torch.cat([batch.positions, padding]),
        cu_seqlens=torch.cat([batch.cu_seqlens, batch.cu_seqlens[-1:] + missing]),
        max_seqlen=max(batch.max_seqlen, missing),
    )
