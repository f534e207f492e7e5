"""New weights into a decoder's own storage: all of them, checked by name, shape and type."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from titan_opd.models import Decoder
from titan_opd.rollout.row_update import RowUpdate
from titan_opd.weights.pieces import WeightSpec
from titan_opd.weights.quantization import is_scale, quantized_tensors, scale_name

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class InPlaceUpdate:
    """Copies complete sets of weights into a decoder, and remembers when one broke off half way.

    Args:
        decoder: is overwritten; its parameters keep their storage.

    Attributes:
        specs: what a complete update consists of.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._dtype = decoder.lm_head_weight.dtype
        self._parameters = {name: value.detach() for name, value in decoder.named_parameters()}
        self._expected = {name: value for name, value in self._parameters.items() if not is_scale(name)}
        self.specs = {name: WeightSpec(tuple(value.shape), value.dtype) for name, value in self._parameters.items()}
        self._failed: str | None = None  # why the weights are not those of any version

    @torch.no_grad()
    def load(self, named_tensors: NamedTensors, version: int) -> None:
        """Copy every parameter once, cast to the decoder's dtype, and quantised where the decoder's is.

        A mapping or another collection (a list, a dict's items) is checked as a whole before the first tensor is
        copied; an iterator hands out its tensors once, so each is checked when it comes, and completeness at the end.
        An error after the first copy leaves the decoder with the weights of no version: `check` refuses it until a
        complete `load`.

        Raises:
            ValueError: a name is unknown, comes twice or is missing, or a shape or type does not fit.
        """
        if isinstance(named_tensors, Mapping):
            named_tensors = named_tensors.items()
        if isinstance(named_tensors, Collection):
            checks = WeightChecks(self._expected, version)
            for name, tensor in named_tensors:
                checks.take(name, tensor)
            checks.finish()
        checks = WeightChecks(self._expected, version)
        copying = False
        try:
            for name, tensor in named_tensors:
                checks.take(name, tensor)
                copying = True
                self._failed = f"to version {version}, stopped at {name!r}"
                self._store(name, tensor)
            checks.finish()
        except BaseException as error:
            if copying:
                self._failed = f"to version {version}: {error}"
            raise
        self._failed = None

    def _store(self, name: str, tensor: Tensor) -> None:
        parameter = self._parameters[name]
        if scale_name(name) not in self._parameters:
            parameter.copy_(tensor)
            return
        for stored, value in quantized_tensors(name, tensor.detach().to(self._dtype), parameter.dtype):
            self._parameters[stored].copy_(value)

    @contextmanager
    def open(self, version: int, *, vocab_size: int) -> Iterator[RowUpdate]:
        """An update in pieces, which is complete when the block is left without an error after `finish`.

        Args:
            version: of the weights.
            vocab_size: tokens of the tokenizer, for `RowUpdate.logprobs`.
        """
        update = RowUpdate(self._decoder, self._parameters, version, vocab_size)
        try:
            yield update
            if not update.is_finished:
                raise ValueError(f"the update to version {version} was left before it was finished")
        except BaseException as error:
            if update.has_written:
                self._failed = f"to version {version}: {error}"
            raise
        self._failed = None

    @property
    def is_complete(self) -> bool:
        """Whether the weights are those of one version."""
        return self._failed is None

    def check(self) -> None:
        """Raise a ValueError when the last update that began to copy did not complete."""
        if self._failed is not None:
            raise ValueError(
                f"the engine holds an incomplete weight update ({self._failed}); it writes again after a complete "
                "load_weights"
            )


class WeightChecks:
    """What can be wrong with the tensors of one update, as they come.

    Args:
        parameters: what is expected, by name; tensors on the meta device will do.
        version: of the weights.
    """

    def __init__(self, parameters: Mapping[str, Tensor], version: int) -> None:
        self._parameters = parameters
        self._missing = set(self._parameters)
        self._version = version

    def take(self, name: str, tensor: Tensor) -> None:
        """Raise a ValueError when `tensor` is for no parameter, or does not fit it."""
        if name not in self._parameters:
            raise ValueError(f"weights hold {name!r}, which the engine's model has no parameter for")
        if name not in self._missing:
            raise ValueError(f"weights hold {name!r} twice; an update must bring every parameter once")
        expected = self._parameters[name]
        if tensor.shape != expected.shape:
            raise ValueError(
                f"the shape of {name!r} is {list(tensor.shape)} in the weights and {list(expected.shape)} in the engine"
            )
        if not tensor.is_floating_point():
            raise ValueError(f"{name!r} is of type {tensor.dtype} in the weights; the engine casts floating types only")
        self._missing.remove(name)

    def finish(self) -> None:
        """Raise a ValueError when a parameter got no tensor."""
        if self._missing:
            raise ValueError(
                f"the weights of version {self._version} lack {len(self._missing)} of {len(self._parameters)} "
                f"parameters: {_listed(self._missing)}; an update must bring every parameter once"
            )


def _listed(names: Collection[str], most: int = 5) -> str:
    shown = ", ".join(sorted(names)[:most])
    return shown if len(names) <= most else f"{shown}, ..."
