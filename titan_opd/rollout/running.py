"""The sequences that are being written: what each has to say so far, row by row as in the KV cache.

Shape suffixes: B rows, R rows that write a token, N tokens of an answer, M kept candidates, m Monte Carlo samples,
K recorded candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_opd.config.schema import SamplingConfig
from titan_opd.data.records import Sample, Trajectory
from titan_opd.rollout.sampler import Draws


class RunningBatch:
    """B rows, each empty or with one running sequence. Which row a sequence has is the caller's to decide.

    Args:
        num_rows: B.
        sampling: the sampler's settings; `max_new_tokens` bounds an answer.
        stops_V: [V] bool, the tokens that end an answer.

    Attributes:
        samples: what stands in each row; None in an empty one.
        last_ids_B: the token that each sequence wrote last.
        numbers_B: sample numbers.
        num_written_B: tokens that each sequence has written, the position in the answer of the next one.
        prompt_lengths_B: tokens of each prompt.
        cache_versions_B: the oldest version that computed any of the row's keys and values.
    """

    def __init__(self, num_rows: int, sampling: SamplingConfig, stops_V: Tensor) -> None:
        device = stops_V.device
        self.samples: list[Sample | None] = [None] * num_rows
        self._state_5B = torch.zeros(5, num_rows, dtype=torch.int64, device=device)
        self.last_ids_B, self.numbers_B, self.num_written_B, self.prompt_lengths_B, self.cache_versions_B = (
            self._state_5B.unbind()
        )
        self._sampling = sampling
        self._stops_V = stops_V
        self._supports: list[list[Tensor]] = [[] for _ in range(num_rows)]  # kept sets differ in width step by step
        self._policy_versions, self._kv_versions = torch.zeros(
            2, num_rows, sampling.max_new_tokens, dtype=torch.int32, device=device
        )
        self._recorded: dict[str, Tensor] = {}  # every other field of Draws, [B, max_new_tokens, ...]
        self._num_running = 0

    def __len__(self) -> int:
        """Number of running sequences."""
        return self._num_running

    @property
    def last_positions_B(self) -> Tensor:
        """[B] position of the token that each sequence wrote last, counted from the start of the prompt."""
        return self.prompt_lengths_B + self.num_written_B - 1

    def join(self, first_row: int, samples: Sequence[Sample], version: int) -> None:
        """Let sequences that have written nothing yet join in empty rows, from `first_row` on."""
        rows = slice(first_row, first_row + len(samples))
        self.samples[rows] = samples
        self.numbers_B[rows] = torch.tensor([sample.number for sample in samples])
        self.prompt_lengths_B[rows] = torch.tensor([len(sample.prompt.token_ids) for sample in samples])
        self.num_written_B[rows] = 0
        self.cache_versions_B[rows] = version
        self._num_running += len(samples)

    def append(self, rows_R: Tensor, draws: Draws, version: int) -> list[int]:
        """Write one token to each of the rows.

        Args:
            rows_R: [R] int64, ascending.
            draws: R rows.
            version: of the weights that computed the logits.

        Returns:
            The rows that have finished, in ascending order.
        """
        written_R = self.num_written_B[rows_R]
        for name, values in draws._asdict().items():
            if values is None:
                continue
            if name == "support":
                for row, row_support in zip(rows_R.tolist(), values.unbind(), strict=True):
                    self._supports[row].append(row_support)
                continue
            self._buffer(name, values)[rows_R, written_R] = values
        self._policy_versions[rows_R, written_R] = version
        self._kv_versions[rows_R, written_R] = self.cache_versions_B[rows_R].int()
        written_R += 1
        self.num_written_B[rows_R] = written_R
        self.last_ids_B[rows_R] = draws.token_ids
        finished_R = self._stops_V[draws.token_ids] | (written_R == self._sampling.max_new_tokens)
        return rows_R[finished_R].tolist()

    def remove(self, row: int) -> None:
        """Empty a row."""
        self.samples[row] = None
        self._supports[row] = []
        self._num_running -= 1

    def move(self, source: int, target: int) -> None:
        """Move a sequence into an empty row."""
        num_written = int(self.num_written_B[source])
        self._state_5B[:, target] = self._state_5B[:, source]
        for tensor in (self._policy_versions, self._kv_versions, *self._recorded.values()):
            tensor[target, :num_written] = tensor[source, :num_written]
        self.samples[target], self._supports[target] = self.samples[source], self._supports[source]
        self.samples[source], self._supports[source] = None, []

    def cached_ids(self, row: int) -> Tensor:
        """The tokens whose keys and values are in the cache: the prompt and the answer but for its last token."""
        sample = self.samples[row]
        assert sample is not None
        written = self._recorded["token_ids"][row, : int(self.num_written_B[row]) - 1]
        return torch.cat([sample.prompt.token_ids.to(written.device), written])

    def trajectory(self, row: int) -> Trajectory:
        """The finished answer in a row."""
        num_written = int(self.num_written_B[row])

        def take(tensor: Tensor) -> Tensor:
            return tensor[row, :num_written].cpu().clone()

        fields = {name: take(tensor) for name, tensor in self._recorded.items()}
        response_ids = fields.pop("token_ids")
        policy_versions, kv_versions = take(self._policy_versions), take(self._kv_versions)
        support = self._supports[row]
        sample = self.samples[row]
        assert sample is not None
        return Trajectory(
            sample=sample,
            response_ids=response_ids,
            policy_versions=policy_versions,
            finish_reason="stop" if self._stops_V[response_ids[-1]] else "length",
            sampling=self._sampling,
            behavior_logprobs=fields.pop("logprobs"),
            behavior_support=stack_ragged(support) if support else None,
            kv_versions=None if torch.equal(kv_versions, policy_versions) else kv_versions,
            **fields,
        )

    def _buffer(self, name: str, values: Tensor) -> Tensor:
        if name not in self._recorded:
            shape = (len(self.samples), self._sampling.max_new_tokens, *values.shape[1:])
            self._recorded[name] = values.new_empty(shape)
        return self._recorded[name]


def stack_ragged(rows: list[Tensor]) -> Tensor:
    """[N, M] from N rows of different widths, each already padded with -1, as narrow as the widest of them allows."""
    stacked_NM = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    width = int((stacked_NM >= 0).sum(dim=1).max())
    return stacked_NM[:, :width].cpu().clone()
