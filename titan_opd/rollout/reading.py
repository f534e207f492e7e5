"""Reading answers that somebody else wrote: what the policy would have written at each of their tokens.

Prompts and answers go through the decoder once, packed; the vocabulary projection runs in chunks of rows, on response
positions only.

Shape suffixes: N response tokens, C rows of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_opd.data.packing import num_inputs, pack_microbatch, plan_microbatches
from titan_opd.data.records import ScoredTrajectory, Trajectory
from titan_opd.losses import TeacherScores
from titan_opd.models import Decoder, PackedAttention
from titan_opd.rollout.sampler import Draws, Sampler

READ_TOKENS = 8192  # most tokens of one forward pass (a longer sequence goes alone): bounds activations


def read_answers(
    decoder: Decoder,
    trajectories: Sequence[Trajectory],
    sampler: Sampler,
    *,
    rows_per_chunk: int,
    one_at_a_time: bool = False,
) -> list[Trajectory]:
    """The same answers with the policy's log-probabilities of their tokens, and with what `sampler` records.

    Args:
        decoder: the policy.
        trajectories: answers of at least one token.
        sampler: draws the samples beside each token.
        rows_per_chunk: rows of logits held at a time.
        one_at_a_time: a forward pass for each answer, so that what is read does not depend on the others, to the bit.
    """
    read = list(trajectories)
    capacity = max([READ_TOKENS, *map(num_inputs, trajectories)])
    groups = plan_microbatches(trajectories, capacity, option="READ_TOKENS")
    if one_at_a_time:
        groups = [[i] for members in groups for i in members]
    for members in groups:
        answers = [trajectories[i] for i in members]
        lengths = [len(answer.response_ids) for answer in answers]
        draws = _draw_beside(decoder, answers, lengths, sampler, rows_per_chunk)
        columns = [x.cpu().split(lengths) for x in draws.values()]
        for i, *rows in zip(members, *columns, strict=True):
            read[i] = replace(trajectories[i], **dict(zip(draws, rows, strict=True)))
    return read


def _draw_beside(
    decoder: Decoder, answers: Sequence[Trajectory], lengths: list[int], sampler: Sampler, rows_per_chunk: int
) -> dict[str, Tensor]:
    """Fields of Trajectory, with the rows of all answers one after the other."""
    hidden_NH = _response_states(decoder, answers)
    numbers = torch.tensor([answer.sample.number for answer in answers])
    numbers_N = numbers.repeat_interleave(torch.tensor(lengths)).to(hidden_NH.device)
    positions_N = torch.cat([torch.arange(length) for length in lengths]).to(hidden_NH.device)
    written_N = torch.cat([answer.response_ids for answer in answers]).to(hidden_NH.device)
    drawn = []
    for first in range(0, len(hidden_NH), rows_per_chunk):
        rows = slice(first, first + rows_per_chunk)
        logits_CV = F.linear(hidden_NH[rows], decoder.lm_head_weight)
        drawn.append(sampler.draw(logits_CV, numbers_N[rows], positions_N[rows], written_N[rows]))
    return _trajectory_fields(drawn)


def _response_states(decoder: Decoder, answers: Sequence[Trajectory]) -> Tensor:
    """[N, H] the hidden states that predict the answers' tokens."""
    batch = pack_microbatch([ScoredTrajectory(answer, TeacherScores()) for answer in answers])
    batch = batch.to(decoder.lm_head_weight.device)
    attention = PackedAttention(batch.cu_seqlens, batch.max_seqlen)
    return decoder(batch.input_ids, batch.positions, attention)[batch.loss_positions]


def _trajectory_fields(drawn: Sequence[Draws]) -> dict[str, Tensor]:
    fields = {
        name: torch.cat(chunks)
        for name, chunks in zip(Draws._fields, zip(*drawn, strict=True), strict=True)
        if name != "support" and chunks[0] is not None
    }
    del fields["token_ids"]  # the answers' own
    fields["behavior_logprobs"] = fields.pop("logprobs")
    if drawn[0].support is not None:  # chunks differ in the width of their kept sets
        width = max(draws.support.shape[1] for draws in drawn)
        padded = [F.pad(draws.support, (0, width - draws.support.shape[1]), value=-1) for draws in drawn]
        fields["behavior_support"] = torch.cat(padded)
    return fields
