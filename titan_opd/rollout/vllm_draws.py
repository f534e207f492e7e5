"""The native engine's sampler inside vLLM: for what vLLM's own sampler does not record.

vLLM draws one token and forgets the rest. Monte Carlo samples beside it, or the set that top-p kept, have to come from
the same logits; so here a logits processor draws with `rollout.sampler`, keeps the records, and leaves vLLM a single
token to choose. A draw is keyed by seed, sample number and position, as the native engine's: with equal logits the
answers are equal too.

For vLLM's V1 model runner, the one of every CPU. On a GPU the engine asks for it (`VLLM_USE_V2_MODEL_RUNNER=0`).

Shape suffixes: R running sequences, V vocabulary.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from titan_opd.config.schema import SamplingConfig
from titan_opd.rollout.engine import Recording
from titan_opd.rollout.sampler import Draws, Sampler

ARGUMENT = "titan_opd_draws"  # in SamplingParams.extra_args
_records: dict[str, dict[int, dict[str, Tensor]]] = {}  # of each request, by position: a row of Draws


def draw_arguments(key: str, number: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The `extra_args` of a request whose tokens are drawn here.

    Args:
        key: of its records, unique among requests.
        number: the sample's, for the noise.
        settings: of `draw_settings`.
    """
    return {ARGUMENT: {"key": key, "number": number, "settings": json.dumps(settings, sort_keys=True)}}


def draw_settings(sampling: SamplingConfig, recording: Recording, *, vocab_size: int, seed: int) -> dict[str, Any]:
    """What a `Sampler` is made with, for `draw_arguments`."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "num_samples": recording.num_samples,
        "record_top_k": recording.top_k,
        "vocab_size": vocab_size,
        "seed": seed,
    }


class DrawsProcessor(LogitsProcessor):
    """Draws, records, and leaves one token in each row; rows of other requests are as they were."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[dict[str, Any], list[int]]] = {}  # arguments, and the answer so far
        self._samplers: dict[str, Sampler] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, output_ids in batch_update.added:
            self._rows.pop(index, None)
            arguments = (params.extra_args or {}).get(ARGUMENT)
            if arguments is not None:
                self._rows[index] = (arguments, output_ids)  # vLLM appends to this list
        for source, target, direction in batch_update.moved:
            left, right = self._rows.pop(source, None), self._rows.pop(target, None)
            if left is not None:
                self._rows[target] = left
            if right is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = right

    def apply(self, logits: Tensor) -> Tensor:
        groups: dict[str, list[int]] = defaultdict(list)
        for index, (arguments, _) in self._rows.items():
            groups[arguments["settings"]].append(index)
        for settings, rows in groups.items():
            numbers_R = torch.tensor([self._rows[row][0]["number"] for row in rows], device=logits.device)
            positions = [len(self._rows[row][1]) for row in rows]
            draws = self._sampler(settings).draw(logits[rows], numbers_R, torch.tensor(positions, device=logits.device))
            logits[rows] = -torch.inf
            logits[rows, draws.token_ids] = 0.0
            self._record(rows, positions, draws)
        return logits

    def _sampler(self, settings: str) -> Sampler:
        if settings not in self._samplers:
            given = json.loads(settings)
            self._samplers[settings] = Sampler(
                SamplingConfig(temperature=given["temperature"], top_k=given["top_k"], top_p=given["top_p"]),
                Recording(given["num_samples"], given["record_top_k"]),
                vocab_size=given["vocab_size"],
                seed=given["seed"],
            )
        return self._samplers[settings]

    def _record(self, rows: list[int], positions: list[int], draws: Draws) -> None:
        columns = {name: values.cpu() for name, values in draws._asdict().items() if values is not None}
        for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
            # A prompt that is read in several parts, or again after its cache was cleared, draws anew for a position.
            by_position = _records.setdefault(self._rows[row][0]["key"], {})
            by_position[position] = {name: values[i] for name, values in columns.items()}


def take_records(keys: list[str]) -> list[dict[str, Any] | None]:
    """The records of requests, position by position, and forget them.

    Returns:
        For each key None when there are none, else for each field of `Draws` its shapes and bytes, so that any
        channel between processes can carry them.
    """
    return [_pack(_records.pop(key, None)) for key in keys]


def _pack(by_position: dict[int, dict[str, Tensor]] | None) -> dict[str, Any] | None:
    if by_position is None:
        return None
    packed = {}
    for name, first in by_position[0].items():
        rows = [by_position[position][name].contiguous() for position in sorted(by_position)]
        content = b"".join(row.numpy().tobytes() for row in rows)
        packed[name] = [str(first.dtype).removeprefix("torch."), [list(row.shape) for row in rows], content]
    return packed


def unpack_records(packed: dict[str, Any]) -> dict[str, list[Tensor]]:
    """For each recorded field of `Draws` its rows, in the order of positions."""
    fields = {}
    for name, (dtype_name, shapes, content) in packed.items():
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype_name))
        fields[name] = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
    return fields
