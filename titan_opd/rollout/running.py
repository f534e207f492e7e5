"""The sequences that are being written: what each has to say so far, row by row as in the KV cache.

Shape suffixes: R running sequences, N tokens of an answer, M kept candidates, m Monte Carlo samples, K recorded
candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titan_opd.config.schema import SamplingConfig
from titan_opd.data.records import Sample, Trajectory
from titan_opd.rollout.sampler import Draws


class RunningBatch:
    """Rows 0 .. R - 1, one for each running sequence, without gaps.

    Args:
        num_rows: most sequences at the same time.
        sampling: the sampler's settings; `max_new_tokens` bounds an answer.
        stops_V: [V] bool, the tokens that end an answer.
        policy_version: of the weights that write.
    """

    def __init__(self, num_rows: int, sampling: SamplingConfig, stops_V: Tensor, policy_version: int) -> None:
        device = stops_V.device
        self._num_rows = num_rows
        self._sampling = sampling
        self._stops_V = stops_V
        self._policy_version = policy_version
        self._samples: list[Sample] = []
        self._supports: list[list[Tensor]] = []  # a list for each row: the kept sets differ in width from step to step
        self._recorded: dict[str, Tensor] = {}  # every other field of Draws, [num_rows, max_new_tokens, ...]
        self._last_ids, self._numbers, self._num_written, self._prompt_lengths = torch.zeros(
            4, num_rows, dtype=torch.int64, device=device
        )

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def num_free(self) -> int:
        return self._num_rows - len(self)

    @property
    def last_ids_R(self) -> Tensor:
        """[R] the token that each sequence wrote last."""
        return self._last_ids[: len(self)]

    @property
    def last_positions_R(self) -> Tensor:
        """[R] position of that token, counted from the start of the prompt."""
        return self._prompt_lengths[: len(self)] + self._num_written[: len(self)] - 1

    @property
    def numbers_R(self) -> Tensor:
        """[R] sample numbers."""
        return self._numbers[: len(self)]

    @property
    def num_written_R(self) -> Tensor:
        """[R] tokens that each sequence has written, the position in the answer of the next one."""
        return self._num_written[: len(self)]

    def join(self, samples: list[Sample]) -> None:
        """Append sequences that have written nothing yet."""
        rows = slice(len(self), len(self) + len(samples))
        self._samples += samples
        self._supports += [[] for _ in samples]
        self._numbers[rows] = torch.tensor([sample.number for sample in samples])
        self._prompt_lengths[rows] = torch.tensor([len(sample.prompt.token_ids) for sample in samples])
        self._num_written[rows] = 0

    def append(self, draws: Draws) -> list[int]:
        """Write one token to each sequence.

        Returns:
            The rows that have finished, in ascending order.
        """
        rows = torch.arange(len(self), device=self._numbers.device)
        written = self._num_written[: len(self)]
        for name, values in draws._asdict().items():
            if values is None:
                continue
            if name == "support":
                for kept, row_support in zip(self._supports, values.unbind(), strict=True):
                    kept.append(row_support)
                continue
            self._buffer(name, values)[rows, written] = values
        written += 1
        self._last_ids[: len(self)] = draws.token_ids
        finished = self._stops_V[draws.token_ids] | (written == self._sampling.max_new_tokens)
        return finished.nonzero().flatten().tolist()

    def pop(self, row: int) -> Trajectory:
        """Take a finished sequence out; the last row moves into its place."""
        trajectory = self._trajectory(row)
        last = len(self) - 1
        if row != last:
            for tensor in (self._last_ids, self._numbers, self._num_written, self._prompt_lengths):
                tensor[row] = tensor[last]
            num_written = int(self._num_written[last])
            for tensor in self._recorded.values():
                tensor[row, :num_written] = tensor[last, :num_written]
            self._samples[row], self._supports[row] = self._samples[last], self._supports[last]
        self._samples.pop()
        self._supports.pop()
        return trajectory

    def _buffer(self, name: str, values: Tensor) -> Tensor:
        if name not in self._recorded:
            shape = (self._num_rows, self._sampling.max_new_tokens, *values.shape[1:])
            self._recorded[name] = values.new_empty(shape)
        return self._recorded[name]

    def _trajectory(self, row: int) -> Trajectory:
        num_written = int(self._num_written[row])
        fields = {name: tensor[row, :num_written].cpu().clone() for name, tensor in self._recorded.items()}
        response_ids = fields.pop("token_ids")
        support = self._supports[row]
        return Trajectory(
            sample=self._samples[row],
            response_ids=response_ids,
            policy_versions=torch.full((num_written,), self._policy_version, dtype=torch.int32),
            finish_reason="stop" if self._stops_V[response_ids[-1]] else "length",
            sampling=self._sampling,
            behavior_logprobs=fields.pop("logprobs"),
            behavior_support=_stack_ragged(support) if support else None,
            **fields,
        )


def _stack_ragged(rows: list[Tensor]) -> Tensor:
    """[N, M] from N rows of different widths, each already padded with -1, as narrow as the widest of them allows."""
    stacked_NM = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    width = int((stacked_NM >= 0).sum(dim=1).max())
    return stacked_NM[:, :width].cpu().clone()
