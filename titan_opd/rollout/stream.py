"""A stream of answers: sequences that wait, join, write one token a step and leave, with the cache that they share.

Two ways to give rows to sequences. `Stream` keeps the running sequences in the first rows, without gaps: a step
computes no more than is running, and shapes change with every join and leave. `PinnedStream` gives every sample a row
of its own, and all its shapes are fixed: an answer is the same to the bit, whatever else is written.

Shape suffixes: R decoding sequences, T packed tokens of a step, H hidden, V vocabulary, B rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_opd.config.schema import SamplingConfig
from titan_opd.data.records import Sample, Trajectory
from titan_opd.models import Decoder
from titan_opd.rollout.kv_cache import KVCache, StepAttention
from titan_opd.rollout.running import RunningBatch
from titan_opd.rollout.sampler import Draws, Sampler

PREFILL_TOKENS = 8192  # most tokens of the texts of one pass (a longer text goes alone): bounds activations


class Stream:
    """Answers under one set of sampling settings, in a cache of fixed size.

    Args:
        decoder: writes. Its weights may change between steps; the caller then tells `weights_changed`.
        sampler: draws tokens.
        sampling: the settings of `sampler`.
        stops_V: [V] bool, the tokens that end an answer.
        num_rows: B, sequences that run at the same time.
        num_positions: tokens of a sequence, its prompt included.
    """

    def __init__(
        self,
        decoder: Decoder,
        sampler: Sampler,
        sampling: SamplingConfig,
        stops_V: Tensor,
        *,
        num_rows: int,
        num_positions: int,
    ) -> None:
        self._decoder = decoder
        self._sampler = sampler
        self._num_rows = num_rows
        dtype = decoder.lm_head_weight.dtype
        self._cache = KVCache(decoder.config, num_rows, num_positions, dtype=dtype, device=stops_V.device)
        self._batch = RunningBatch(num_rows, sampling, stops_V)
        self._waiting: deque[Sample] = deque()
        self._rebuild_due = False

    @property
    def num_running(self) -> int:
        return len(self._batch)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def samples(self) -> Iterator[Sample]:
        """All that run or wait."""
        yield from (sample for sample in self._batch.samples if sample is not None)
        yield from self._waiting

    def submit(self, samples: Sequence[Sample]) -> None:
        """Let samples wait for a row; first come, first served."""
        self._waiting += samples

    def cancel(self, numbers: Collection[int]) -> list[Sample]:
        """Forget the samples of these numbers, and what they have written; numbers of no sample here are passed over.

        Returns:
            The samples that were dropped.
        """
        rows = [
            row for row, sample in enumerate(self._batch.samples) if sample is not None and sample.number in numbers
        ]
        dropped = [sample for sample in self.samples() if sample.number in numbers]
        for row in reversed(rows):  # from the end, so that a row which moves is never one that is still to be freed
            self._free(row)
        self._waiting = deque(sample for sample in self._waiting if sample.number not in numbers)
        return dropped

    def weights_changed(self, *, recompute_kv: bool) -> None:
        """The decoder has new weights; with `recompute_kv` the next step computes all keys and values anew."""
        self._rebuild_due |= recompute_kv

    def step(self, version: int) -> list[Trajectory]:
        """One token for every running sequence and for those that join now.

        Args:
            version: of the decoder's weights.

        Returns:
            The answers that ended, in no particular order.
        """
        if self._rebuild_due:
            self._rebuild(version)
            self._rebuild_due = False
        answers = []
        for row in reversed(self._write(version)):  # from the end, so that a row which moves is never a finished one
            answers.append(self._batch.trajectory(row))
            self._free(row)
        return answers

    def _running_rows(self) -> list[int]:
        return [row for row, sample in enumerate(self._batch.samples) if sample is not None]

    def _write(self, version: int) -> list[int]:
        """Let waiting samples join, and write a token to each sequence; the rows that have finished, ascending."""
        batch, num_decoding = self._batch, len(self._batch)
        joining = self._next_group()
        prompts = [sample.prompt.token_ids for sample in joining]
        decoding = slice(0, num_decoding)
        attention = StepAttention(self._cache, batch.last_positions_B[decoding], [len(prompt) for prompt in prompts])
        input_ids_T = batch.last_ids_B[decoding]
        if joining:
            input_ids_T = torch.cat([input_ids_T, torch.cat(prompts).to(input_ids_T.device)])
            batch.join(num_decoding, joining, version)
        hidden_TH = self._decoder(input_ids_T, attention.positions_T, attention)
        if joining:  # of a prompt, only the last token predicts
            ends = num_decoding - 1 + torch.tensor([len(prompt) for prompt in prompts]).cumsum(0)
            hidden_TH = torch.cat([hidden_TH[decoding], hidden_TH[ends.to(hidden_TH.device)]])
        draws = self._draw(hidden_TH, slice(0, len(batch)))
        return batch.append(torch.arange(len(batch), device=hidden_TH.device), draws, version)

    def _draw(self, hidden_RH: Tensor, rows: slice) -> Draws:
        logits_RV = F.linear(hidden_RH, self._decoder.lm_head_weight)
        return self._sampler.draw(logits_RV, self._batch.numbers_B[rows], self._batch.num_written_B[rows])

    def _next_group(self) -> list[Sample]:
        """Take the samples that join next: as many as there are free rows and `PREFILL_TOKENS` allow, one at least."""
        num_free = self._num_rows - len(self._batch)
        group: list[Sample] = []
        num_tokens = 0
        while self._waiting and len(group) < num_free:
            num_tokens += len(self._waiting[0].prompt.token_ids)
            if group and num_tokens > PREFILL_TOKENS:
                break
            group.append(self._waiting.popleft())
        return group

    def _free(self, row: int) -> None:
        """Empty a row; the last one moves into its place."""
        batch = self._batch
        last = len(batch) - 1
        batch.remove(row)
        if row != last:
            self._cache.move_row(last, row, int(batch.last_positions_B[last]))
            batch.move(last, row)

    def _rebuild(self, version: int) -> None:
        """Compute the keys and values of all running sequences anew."""
        for rows in self._rebuild_groups():
            texts = [self._batch.cached_ids(row) for row in rows]
            self._read(rows[0], texts)
            self._batch.cache_versions_B[rows[0] : rows[-1] + 1] = version

    def _rebuild_groups(self) -> Iterator[list[int]]:
        """The running rows in groups of consecutive ones, of at most `PREFILL_TOKENS` tokens or one row."""
        group: list[int] = []
        num_tokens = 0
        for row, length in enumerate(self._batch.last_positions_B[: len(self._batch)].tolist()):
            if group and num_tokens + length > PREFILL_TOKENS:
                yield group
                group, num_tokens = [], 0
            group.append(row)
            num_tokens += length
        if group:
            yield group

    def _read(self, first_row: int, texts: Sequence[Tensor]) -> Tensor:
        """[T, H] of whole texts, whose keys and values go into the rows from `first_row` on."""
        nobody = self._batch.last_ids_B[:0]
        attention = StepAttention(self._cache, nobody, [len(text) for text in texts], first_text_row=first_row)
        return self._decoder(torch.cat(list(texts)).to(nobody.device), attention.positions_T, attention)


class PinnedStream(Stream):
    """A stream in which the bits of an answer depend on its own sample and on the engine's settings only.

    Sample n runs in row n mod B. Every step decodes all B rows, empty ones with a token that nobody reads, and reads
    the whole cache; prompts are read one at a time. So whatever computes a sequence's numbers has the same shape, and
    the sequence the same place in it, in any company. (The same shape alone is not enough: a row's last bits depend on
    its place where a kernel handles the end of a tensor in another way than its middle, as vectorised ones do.)
    """

    def _write(self, version: int) -> list[int]:
        batch = self._batch
        running = self._running_rows()
        joining = self._next_group()
        finished = []
        if running:
            # What an empty row writes into the cache, the next sequence there overwrites before it is read.
            positions_B = batch.last_positions_B.clamp(min=0)
            attention = StepAttention(self._cache, positions_B, [], read_all=True)
            hidden_BH = self._decoder(batch.last_ids_B, positions_B, attention)
            draws = self._draw(hidden_BH, slice(None))
            rows_R = torch.tensor(running, device=hidden_BH.device)
            draws = Draws(*(None if values is None else values[rows_R] for values in draws))
            finished += batch.append(rows_R, draws, version)
        for sample in joining:
            row = self._row(sample)
            hidden_TH = self._read(row, [sample.prompt.token_ids])
            batch.join(row, [sample], version)
            draws = self._draw(hidden_TH[-1:], slice(row, row + 1))
            finished += batch.append(torch.tensor([row], device=hidden_TH.device), draws, version)
        return sorted(finished)

    def _row(self, sample: Sample) -> int:
        return sample.number % self._num_rows

    def _next_group(self) -> list[Sample]:
        """Take for each empty row the first sample that waits for it."""
        empty = {row for row, sample in enumerate(self._batch.samples) if sample is None}
        group: list[Sample] = []
        waiting: deque[Sample] = deque()
        while self._waiting and empty:
            sample = self._waiting.popleft()
            row = self._row(sample)
            if row in empty:
                empty.remove(row)
                group.append(sample)
            else:
                waiting.append(sample)
        waiting += self._waiting
        self._waiting = waiting
        return group

    def _free(self, row: int) -> None:
        self._batch.remove(row)

    def _rebuild_groups(self) -> Iterator[list[int]]:
        yield from ([row] for row in self._running_rows())
