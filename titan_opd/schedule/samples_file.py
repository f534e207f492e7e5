"""Scored answers on disk: those that a checkpoint keeps, and those that a journal with payload records.

A file is a row of records, each with its length before it: a msgpack list of the sample's number and the frames of its
channel record. No pickle: whatever is in such a file, reading it executes nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from titan_opd.channel import ChannelError, decode_record, encode_record
from titan_opd.data.records import ScoredTrajectory
from titan_opd.errors import writing

_LENGTH = struct.Struct("<Q")


def write_samples(path: Path, samples: Iterable[ScoredTrajectory]) -> None:
    """Write scored answers. The teacher's output projection of dense scores is left out.

    Raises:
        StorageError: they could not be written.
    """
    with writing(path), path.open("wb") as file:
        for one in samples:
            frames = encode_record(replace(one, scores=replace(one.scores, lm_head_weight=None)))
            record = msgspec.msgpack.encode([bytes(frame) for frame in frames])
            file.write(_LENGTH.pack(len(record)) + record)


def read_samples(path: Path) -> Iterator[ScoredTrajectory]:
    """The scored answers of a file, in the order in which they were written.

    Raises:
        ValueError: the file is missing, cut short or damaged.
    """
    try:
        with path.open("rb") as file:
            while length := file.read(_LENGTH.size):
                (size,) = _LENGTH.unpack(length)
                record = file.read(size)
                if len(record) < size:
                    raise ValueError("it is cut short")
                frames = msgspec.msgpack.decode(record, type=list[bytes])
                yield decode_record(ScoredTrajectory, frames, sender=str(path))
    except (OSError, ValueError, struct.error, ChannelError, msgspec.DecodeError) as error:
        raise ValueError(f"{path} cannot be read as scored answers ({error})") from error
