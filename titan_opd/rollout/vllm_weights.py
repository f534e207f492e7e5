"""The engine's end of an update of vLLM's weights, a `titan_opd.weights.target.WeightUpdate`.

vLLM's reload leaves the old tensors of a layer that gets none, and completes a half-loaded one with memory that nobody
wrote. So completeness is checked here, before the update is finished.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from titan_opd.models import Decoder, DecoderConfig
from titan_opd.ops import multi_digest
from titan_opd.rollout.engine import check_version
from titan_opd.rollout.update import NamedTensors, WeightChecks
from titan_opd.rollout.vllm_receiver import bucket_tensors, map_file
from titan_opd.weights.pieces import Piece, WeightSpec
from titan_opd.weights.quantization import TYPES, is_quantized, quantized_specs, quantized_tensors
from titan_opd.weights.verify import check_digests

BUCKET_BYTES = 64 << 20  # a larger tensor has a bucket of its own
_ALIGNMENT = 64
_SHARED_MEMORY = "/dev/shm"


class Carrier(Protocol):
    """How tensors reach the model in vLLM's workers, and how it is asked about them."""

    def begin(self) -> None:
        """Stop writing, and open an update."""

    def send(self, pieces: Sequence[Piece]) -> None:
        """Bring whole tensors; the memory of those that do not stay may change after the call."""

    def finish(self, version: int) -> None:
        """Close the update: the model computes with the new weights."""

    def resume(self) -> None:
        """Write on."""

    def digests(self) -> Mapping[str, int]:
        """Of the tensors as they were handed over to the model, computed there."""

    def logprobs(self, token_ids: list[int]) -> Tensor:
        """[T - 1] float32, of each token but the first, given those before it."""


class VllmWeights:
    """The weights of one engine: what they are, and whether they are those of one version.

    Args:
        model: the student's shape.
        dtype: that the engine stores.
        carrier: the way to the workers.
        quantization: how the weights come, as `rollout.quantization`.

    Attributes:
        version: of the weights in service.
    """

    def __init__(self, model: DecoderConfig, dtype: torch.dtype, carrier: Carrier, quantization: str = "none") -> None:
        with torch.device("meta"):
            self._expected = Decoder(model).to(dtype)
        self._dtype = dtype
        self._quantization = quantization
        self._carrier = carrier
        self._failed: str | None = "it has been given no weights yet"
        self.version = 0

    @property
    def is_complete(self) -> bool:
        """Whether the weights are those of one version."""
        return self._failed is None

    def check(self) -> None:
        """Raise a ValueError when the engine has the weights of no version."""
        if self._failed is not None:
            raise ValueError(
                f"the engine holds an incomplete weight update ({self._failed}); it writes after a complete one"
            )

    def specs(self) -> dict[str, WeightSpec]:
        """What a complete update consists of."""
        specs = {
            name: WeightSpec(tuple(parameter.shape), self._dtype)
            for name, parameter in self._expected.named_parameters()
        }
        return quantized_specs(specs, self._quantization)

    @contextmanager
    def open(self, version: int) -> Iterator[VllmUpdate]:
        """An update, which is in service when the block is left without an error after `finish`.

        An error before the first `write` leaves the old version in service; after it the engine writes nothing until a
        complete update.

        Raises:
            ValueError: the version would fall, or the block was left before `finish`.
        """
        check_version(self.version, version)
        update = VllmUpdate(self.specs(), version, self._carrier)
        try:
            yield update
            if not update.is_finished:
                raise ValueError(f"the update to version {version} was left before it was finished")
        except BaseException as error:
            if update.has_begun:
                self._failed = f"to version {version}: {error}"
            raise
        self._failed = None
        self.version = version
        self._carrier.resume()

    def load(self, named_tensors: NamedTensors, version: int) -> None:
        """All weights by name; what was handed over to the model is compared with what was sent.

        A mapping or another collection is checked as a whole before the first tensor is sent, an iterator's tensors
        when they come, and for completeness at the end.

        Raises:
            ValueError: a name is unknown, comes twice or is missing, a shape or type does not fit, or the version
                would fall.
            VerificationError: the workers have other bytes than those sent.
        """
        if isinstance(named_tensors, Mapping):
            named_tensors = named_tensors.items()
        if isinstance(named_tensors, Collection):
            for _ in self._checked(named_tensors, version):
                pass
        sent: dict[str, int] = {}
        with self.open(version) as update:
            for group in _groups(self._checked(named_tensors, version), BUCKET_BYTES):
                names, tensors = zip(*group, strict=True)
                sent |= zip(names, multi_digest(tensors), strict=True)
                update.write([Piece(name, 0, tensor) for name, tensor in group])
            update.finish()
            check_digests(
                sent, update.written_digests(), previous={}, version=version, worker="the engine", what="written"
            )

    def _checked(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        checks = WeightChecks(dict(self._expected.named_parameters()), version)
        for name, tensor in named_tensors:
            checks.take(name, tensor)
            cast = tensor.detach().to(self._dtype)
            if self._quantization == "none" or not is_quantized(name):
                yield name, cast
            else:
                yield from quantized_tensors(name, cast, TYPES[self._quantization])
        checks.finish()


class VllmUpdate:
    """An update under way.

    Args:
        specs: what it has to bring.
        version: of the weights.
        carrier: the way to the workers.

    Attributes:
        has_begun: whether anything has been sent.
        is_finished: whether all has.
    """

    def __init__(self, specs: Mapping[str, WeightSpec], version: int, carrier: Carrier) -> None:
        self.has_begun = False
        self.is_finished = False
        self._version = version
        self._carrier = carrier
        self._specs = specs
        self._missing = set(specs)

    def write(self, pieces: Sequence[Piece]) -> None:
        """Take some parameters, each whole and once.

        Raises:
            ValueError: a part of a parameter, a second time, or of a name that the engine's model has not.
        """
        for piece in pieces:
            if piece.name not in self._missing or tuple(piece.tensor.shape) != self._specs[piece.name].shape:
                raise ValueError(
                    f"version {self._version} brings {piece.name!r} of shape {list(piece.tensor.shape)}, which is no "
                    "parameter of the engine's model, or not whole, or there already"
                )
            self._missing.remove(piece.name)
        if not self.has_begun:
            self.has_begun = True
            self._carrier.begin()
        self._carrier.send(pieces)

    def finish(self) -> None:
        """All parameters have been written.

        Raises:
            ValueError: some have not.
        """
        if self._missing:
            shown = ", ".join(sorted(self._missing)[:5]) + (", ..." if len(self._missing) > 5 else "")
            raise ValueError(
                f"the weights of version {self._version} lack {len(self._missing)} of {len(self._specs)} parameters: "
                f"{shown}; an update must bring every parameter once"
            )
        self._carrier.finish(self._version)
        self.is_finished = True

    def stored(self, name: str) -> Tensor | None:
        """None: vLLM fuses, splits and packs what it stores."""
        return None

    def written_digests(self) -> Mapping[str, int]:
        """The digest of each parameter as it was handed over to the model, computed there."""
        return self._carrier.digests()

    def fingerprint(self, name: str) -> int | None:
        """None: which of vLLM's tensors a parameter went into is not known here."""
        return None

    def logprobs(self, token_ids: Tensor) -> Tensor:
        """[T - 1] float32: the log-probability of each of `token_ids` [T] but the first, under the new weights."""
        return self._carrier.logprobs(token_ids.tolist())


class Bucket:
    """Shared memory that carries tensors to vLLM's workers on this machine.

    Args:
        specs: of every tensor that will ever be in it: it has room for the largest of them, and for `BUCKET_BYTES`.

    Raises:
        ValueError: the shared memory of this machine has no room for it.
    """

    def __init__(self, specs: Mapping[str, WeightSpec]) -> None:
        sizes = [torch.Size(spec.shape).numel() * spec.dtype.itemsize + _ALIGNMENT for spec in specs.values()]
        self.num_bytes = max(max(sizes), min(sum(sizes), BUCKET_BYTES + _ALIGNMENT * len(sizes)))
        handle, self.path = tempfile.mkstemp(prefix="titan-opd-weights-", dir=_SHARED_MEMORY)
        try:
            os.posix_fallocate(handle, 0, self.num_bytes)  # without it, a full file system is found out by SIGBUS
        except OSError as error:
            os.unlink(self.path)
            raise ValueError(
                f"{_SHARED_MEMORY} has no room for {self.num_bytes / 2**20:.0f} MiB, which weights on their way into "
                f"vLLM need ({error}); enlarge it (docker run --shm-size)"
            ) from None
        finally:
            os.close(handle)
        self._bytes = map_file(self.path, self.num_bytes)

    def unlink(self) -> None:
        """Take the file's name away, once every worker has mapped it: a killed process leaves nothing behind."""
        os.unlink(self.path)

    def fill(self, pieces: Sequence[Piece]) -> Iterator[list[Any]]:
        """Fill the bucket, more than once if need be; yields what it holds: [name, dtype, shape, first byte] each."""
        tensors = [(piece.name, piece.tensor) for piece in pieces]
        for group in _groups(iter(tensors), self.num_bytes - _ALIGNMENT * len(tensors)):
            layout, end = [], 0
            for name, tensor in group:
                begin = -(-end // _ALIGNMENT) * _ALIGNMENT
                layout.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), begin])
                next(bucket_tensors(self._bytes, layout[-1:]))[1].copy_(tensor)
                end = begin + tensor.nbytes
            yield layout


def _groups(tensors: Iterator[tuple[str, Tensor]], most_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors in groups of at most `most_bytes`; a larger one is a group of its own."""
    group: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in tensors:
        if group and num_bytes + tensor.nbytes > most_bytes:
            yield group
            group, num_bytes = [], 0
        group.append((name, tensor))
        num_bytes += tensor.nbytes
    if group:
        yield group
