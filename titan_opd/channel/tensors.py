"""A record of tensors as frames: one header that says what follows, and each tensor's bytes as they lie in memory.

A record is a frozen dataclass whose fields are tensors (or None), plain values, or records again: Trajectory,
ScoredTrajectory. The header is msgpack, so nothing that arrives is ever executed, and it is compared with the
dataclass's own annotations before a tensor is made.
"""

from __future__ import annotations

import math
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor

from titan_opd.channel.errors import ChannelError
from titan_opd.channel.transport import Frame

R = TypeVar("R")

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
MAX_DIMS = 8

assert sys.byteorder == "little"  # tensors travel as they lie in memory


@dataclass(frozen=True)
class RecordLimits:
    """What a receiver takes, in bytes."""

    header_bytes: int = 1 << 20
    frame_bytes: int = 1 << 30
    record_bytes: int = 2 << 30


DEFAULT_LIMITS = RecordLimits()


class TensorSpec(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of a record: `name` is the path of its field, such as `trajectory.response_ids`."""

    name: Annotated[str, Meta(max_length=200)]
    dtype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 40)]], Meta(max_length=MAX_DIMS)]


class RecordHeader(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The first frame.

    Attributes:
        record: name of the dataclass.
        tensors: in the order of their frames; a field that is None is absent.
        values: the fields that are no tensors, by path.
    """

    record: Annotated[str, Meta(max_length=64)]
    tensors: Annotated[list[TensorSpec], Meta(max_length=64)]
    values: Annotated[dict[Annotated[str, Meta(max_length=200)], Any], Meta(max_length=64)]


_header_decoder = msgspec.msgpack.Decoder(RecordHeader)


def encode_record(record: Any, limits: RecordLimits = DEFAULT_LIMITS) -> list[Frame]:
    """The frames of a record.

    Frames of contiguous CPU tensors are views of their memory: leave the tensors as they are while frames exist.

    Args:
        record: a dataclass; tensors on any device, dense, of a type in DTYPES.
        limits: the receiver's.

    Raises:
        ValueError: a field cannot travel, or is longer than the receiver takes.
    """
    specs: list[TensorSpec] = []
    values: dict[str, Any] = {}
    buffers: list[Frame] = []
    for path, field_type in _layout(type(record)).items():
        value = _follow(record, path)
        if not field_type.is_tensor:
            values[path] = value
        elif value is not None:
            _check_tensor(path, value, limits)
            specs.append(TensorSpec(path, str(value.dtype).removeprefix("torch."), list(value.shape)))
            buffers.append(_bytes_of(value))
    try:
        header = msgspec.msgpack.encode(RecordHeader(type(record).__name__, specs, values))
    except (TypeError, OverflowError, ValueError, RecursionError) as error:
        raise ValueError(
            f"a value of {type(record).__name__} cannot travel between processes ({error}); keep to texts, numbers, "
            "lists and dictionaries"
        ) from None
    if len(header) > limits.header_bytes:
        raise ValueError(
            f"the values of {type(record).__name__} beside its tensors take {len(header)} bytes, above the "
            f"{limits.header_bytes} of a payload's header; shorten the prompt's question or metadata"
        )
    frames = [header, *buffers]
    if num_bytes(frames) > limits.record_bytes:
        raise ValueError(
            f"a {type(record).__name__} of {num_bytes(frames)} bytes; the most is {limits.record_bytes}: fewer "
            "candidates or samples a token make it smaller"
        )
    return frames


def decode_record(
    record_type: type[R], frames: Sequence[Frame], *, sender: str, limits: RecordLimits = DEFAULT_LIMITS
) -> R:
    """The record in `frames`. Its tensors use the frames' memory where that is aligned for them.

    Args:
        record_type: what it must be.
        frames: what came; untrusted.
        sender: whom an error names.
        limits: above which nothing is looked at.

    Raises:
        ChannelError: anything is not as `record_type` says: names, types, shapes, sizes, values.
    """
    try:
        return _decode(record_type, frames, limits)
    except (ValueError, TypeError, RecursionError) as error:  # a msgspec error is a ValueError
        raise ChannelError(f"no valid {record_type.__name__} ({error})", sender=sender) from None


def num_bytes(frames: Sequence[Frame]) -> int:
    """Bytes of all frames together."""
    return sum(memoryview(frame).nbytes for frame in frames)


def _decode(record_type: type[R], frames: Sequence[Frame], limits: RecordLimits) -> R:
    if not frames:
        raise ValueError("no frames")
    total = num_bytes(frames)
    if total > limits.record_bytes:
        raise ValueError(f"{total} bytes, the most is {limits.record_bytes}")
    first, *buffers = (memoryview(frame) for frame in frames)
    if len(first) > limits.header_bytes:
        raise ValueError(f"a header of {len(first)} bytes, the most is {limits.header_bytes}")
    header = _header_decoder.decode(first)
    if header.record != record_type.__name__:
        raise ValueError(f"it is a {header.record!r}")
    if len(buffers) != len(header.tensors):
        raise ValueError(f"{len(buffers)} frames for {len(header.tensors)} tensors")

    layout = _layout(record_type)
    found: dict[str, Any] = {}
    for spec, buffer in zip(header.tensors, buffers, strict=True):
        if spec.name in found or spec.name not in layout or not layout[spec.name].is_tensor:
            raise ValueError(f"a tensor {spec.name!r} that the record has no place for")
        if len(buffer) > limits.frame_bytes:
            raise ValueError(f"{spec.name} of {len(buffer)} bytes, the most is {limits.frame_bytes}")
        found[spec.name] = _tensor_of(spec, buffer)
    for path, value in header.values.items():
        if path not in layout or layout[path].is_tensor:
            raise ValueError(f"a value {path!r} that the record has no place for")
        found[path] = msgspec.convert(value, layout[path].hint)
    for path, field_type in layout.items():
        if path in found:
            continue
        if not (field_type.is_tensor and field_type.optional):
            raise ValueError(f"no {path}, which it must have")
        found[path] = None
    return _build(record_type, "", found)


# ---- Tensors and bytes -----------------------------------------------------------------------------------------------


def _check_tensor(path: str, tensor: Any, limits: RecordLimits) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{path} is a {type(tensor).__name__}, not a tensor")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ValueError(f"{path} is no dense tensor ({tensor.layout}, {tensor.device}); make it one")
    if tensor.dtype not in DTYPES.values() or tensor.ndim > MAX_DIMS:
        raise ValueError(
            f"{path} has {tensor.ndim} dimensions of type {tensor.dtype}; at most {MAX_DIMS} dimensions of "
            f"{', '.join(DTYPES)} can travel"
        )
    if tensor.nbytes > limits.frame_bytes:
        raise ValueError(f"{path} has {tensor.nbytes} bytes; the most of one tensor is {limits.frame_bytes}")


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel() <= 1:  # its stride may be anything, and `view` wants 1
        flat = flat.as_strided((flat.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())


def _tensor_of(spec: TensorSpec, buffer: memoryview) -> Tensor:
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        raise ValueError(f"{spec.name} of type {spec.dtype!r}")
    expected = math.prod(spec.shape) * dtype.itemsize
    if expected != len(buffer):
        raise ValueError(f"{spec.name} of shape {spec.shape} and type {spec.dtype} in {len(buffer)} bytes")
    if not expected:
        return _empty(spec, dtype)
    if buffer.readonly:
        buffer = memoryview(bytearray(buffer))
    flat = torch.frombuffer(buffer, dtype=torch.uint8)
    if dtype is torch.bool and bool((flat > 1).any()):
        raise ValueError(f"{spec.name} has bytes that are neither true nor false")
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(spec.shape)


def _empty(spec: TensorSpec, dtype: torch.dtype) -> Tensor:
    try:
        return torch.empty(spec.shape, dtype=dtype)
    except RuntimeError:  # strides that overflow
        raise ValueError(f"{spec.name} of shape {spec.shape}") from None


# ---- What a dataclass consists of ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FieldType:
    hint: Any
    is_tensor: bool
    optional: bool


@cache
def _layout(record_type: type) -> dict[str, _FieldType]:
    """Every leaf of a dataclass by its path, records within it taken apart."""
    assert is_dataclass(record_type), record_type
    layout = {}
    for name, hint in _hints(record_type).items():
        optional, inner = _without_none(hint)
        if _is_record(inner):
            assert not optional, f"{record_type.__name__}.{name}: a record within a record is always there"
            layout.update({f"{name}.{path}": leaf for path, leaf in _layout(inner).items()})
        else:
            layout[name] = _FieldType(hint, inner is Tensor, optional)
    return layout


def _hints(record_type: type) -> dict[str, Any]:
    hints = typing.get_type_hints(record_type)
    return {field.name: hints[field.name] for field in fields(record_type)}


def _without_none(hint: Any) -> tuple[bool, Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        choices = [choice for choice in typing.get_args(hint) if choice is not type(None)]
        if len(choices) == 1:
            return True, choices[0]
    return False, hint


def _is_record(hint: Any) -> bool:
    """Whether it is a dataclass with a tensor somewhere; one without is a plain value, such as SamplingConfig."""
    return is_dataclass(hint) and any(leaf.is_tensor for leaf in _layout(hint).values())


def _follow(record: Any, path: str) -> Any:
    for name in path.split("."):
        record = getattr(record, name)
    return record


def _build(record_type: type[R], prefix: str, leaves: dict[str, Any]) -> R:
    arguments = {}
    for name, hint in _hints(record_type).items():
        path = prefix + name
        arguments[name] = _build(hint, f"{path}.", leaves) if _is_record(hint) else leaves[path]
    return record_type(**arguments)
