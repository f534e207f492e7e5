"""Headers as bytes: one msgpack frame a message, checked on both sides."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from titan_opd.channel.errors import ChannelError
from titan_opd.channel.messages import MAX_HEADER_BYTES, AnyMessage, Count, Message
from titan_opd.channel.transport import Frame

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


class _HelloOfAnyVersion(Struct, tag="Hello"):
    protocol: Count
    package_version: Annotated[str, Meta(max_length=64)]


_any_hello_decoder = msgspec.msgpack.Decoder(_HelloOfAnyVersion)


def encode(message: Message) -> bytes:
    """The message's one frame.

    Raises:
        ValueError: it is longer than a message may be, or breaks a bound: the receiver would refuse it.
    """
    frame = _encoder.encode(message)
    try:
        _check_size(frame, "this process")
        _decoder.decode(frame)
    except (ChannelError, msgspec.ValidationError) as error:
        raise ValueError(f"no valid {type(message).__name__}: {error}") from None
    return frame


def decode(frames: list[Frame], sender: str) -> Message:
    """The message in `frames`.

    Raises:
        ChannelError: more than one frame, too many bytes, no message, or a field out of bounds.
    """
    if len(frames) != 1:
        raise ChannelError(f"a header of {len(frames)} frames; it has one", sender=sender)
    _check_size(frames[0], sender)
    try:
        return _decoder.decode(frames[0])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ChannelError(f"no header that can be read ({error})", sender=sender) from None


def protocol_of_hello(frames: list[Frame]) -> tuple[int, str] | None:
    """Protocol and package version of a Hello whose other fields this version may not know; None when it is none."""
    if len(frames) != 1 or len(frames[0]) > MAX_HEADER_BYTES:
        return None
    try:
        hello = _any_hello_decoder.decode(frames[0])
    except (msgspec.DecodeError, RecursionError):
        return None
    return hello.protocol, hello.package_version


def _check_size(frame: Frame, sender: str) -> None:
    if len(frame) > MAX_HEADER_BYTES:
        raise ChannelError(f"a header of {len(frame)} bytes; the most is {MAX_HEADER_BYTES}", sender=sender)
