"""Records as frames: bits, types and shapes survive; whatever else arrives is refused with its sender."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.trajectories import make_trajectories
from titan_opd.channel import ChannelError, RecordLimits, decode_record, encode_record
from titan_opd.channel.tensors import DTYPES, RecordHeader, TensorSpec, num_bytes
from titan_opd.config.schema import SamplingConfig
from titan_opd.data.records import Prompt, Sample, ScoredTrajectory, Trajectory
from titan_opd.losses import TeacherScores

DTYPE = st.sampled_from(sorted(DTYPES))
SHAPE = st.lists(st.integers(0, 4), max_size=4)
NUMBERS = st.integers(0, 1 << 40)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def tensors(draw):
    """Any bits of any type and shape, contiguous or not."""
    dtype, shape = DTYPES[draw(DTYPE)], draw(SHAPE)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(high, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype).squeeze(-1)
    if tensor.ndim >= 2 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    if tensor.ndim and draw(st.booleans()):
        tensor = tensor[::2]
    return tensor


optional_tensors = st.none() | tensors()
prompts = st.builds(
    Prompt,
    id=st.text(max_size=20),
    token_ids=tensors(),
    question=st.none() | st.text() | st.lists(st.dictionaries(st.text(max_size=5), PLAIN, max_size=3), max_size=3),
    answer=st.none() | st.text(),
    response_ids=optional_tensors,
    teacher=st.text(max_size=10),
    metadata=st.dictionaries(st.text(max_size=5), PLAIN, max_size=3),
)
sampling = st.builds(SamplingConfig, temperature=st.floats(0, 5), top_k=st.integers(0, 9), stop_ids=st.just((1, 2)))
trajectories = st.builds(
    Trajectory,
    sample=st.builds(Sample, number=NUMBERS, epoch=NUMBERS, repeat=NUMBERS, prompt=prompts),
    response_ids=tensors(),
    policy_versions=tensors(),
    finish_reason=st.sampled_from(["stop", "length", "expert"]),
    sampling=st.none() | sampling,
    behavior_logprobs=optional_tensors,
    behavior_support=optional_tensors,
    sampled_ids=optional_tensors,
    sampled_logprobs=optional_tensors,
    topk_ids=optional_tensors,
    topk_logprobs=optional_tensors,
)
scores = st.builds(TeacherScores, **{field.name: optional_tensors for field in dataclasses.fields(TeacherScores)})


def assert_same(actual, expected):
    assert type(actual) is type(expected)
    for field in dataclasses.fields(expected):
        left, right = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(right, torch.Tensor):
            assert (left.dtype, left.shape) == (right.dtype, right.shape), field.name
            assert torch.equal(bits(left), bits(right)), field.name
        elif dataclasses.is_dataclass(right) and not isinstance(right, SamplingConfig):
            assert_same(left, right)
        else:
            assert left == right, field.name


def bits(tensor):
    flat = tensor.contiguous().reshape(-1)
    return torch.frombuffer(bytearray(flat.clone().untyped_storage()), dtype=torch.uint8) if flat.numel() else flat


@settings(max_examples=80, deadline=None)
@given(trajectories, scores, st.booleans())
def test_a_scored_trajectory_arrives_bit_by_bit(trajectory, teacher_scores, over_the_wire):
    record = ScoredTrajectory(trajectory, teacher_scores)
    frames = encode_record(record)
    if over_the_wire:  # read-only there, and aligned for nothing
        frames = [memoryview(b"x" + bytes(frame))[1:] for frame in frames]
    assert_same(decode_record(ScoredTrajectory, frames, sender="peer"), record)


def test_nothing_is_copied_where_nothing_has_to_be():
    trajectory = make_trajectories(1, vocab_size=50, num_samples=4, longest=30)[0]
    got = decode_record(Trajectory, encode_record(trajectory), sender="peer")
    assert got.sampled_ids.data_ptr() == trajectory.sampled_ids.data_ptr()


def test_gradients_do_not_travel():
    logprobs = torch.rand(3, requires_grad=True)
    got = decode_record(TeacherScores, encode_record(TeacherScores(tail_logprobs=logprobs)), sender="peer")
    assert not got.tail_logprobs.requires_grad
    assert torch.equal(got.tail_logprobs, logprobs.detach())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.rand(3, dtype=torch.complex64), "complex64"),
        (torch.rand(3).to_sparse(), "no dense tensor"),
        (torch.empty(3, device="meta"), "no dense tensor"),
        (torch.zeros((1,) * 9), "9 dimensions"),
        ([1, 2], "ids is a list"),
        (torch.zeros(300, dtype=torch.uint8), "ids has 300 bytes"),
    ],
)
def test_a_field_that_cannot_travel_is_named(value, message):
    with pytest.raises(ValueError, match=message):
        encode_record(TeacherScores(ids=value), RecordLimits(frame_bytes=200))


def test_values_that_cannot_travel_are_refused():
    trajectory = make_trajectories(1, vocab_size=50)[0]

    def with_metadata(metadata):
        prompt = dataclasses.replace(trajectory.prompt, metadata=metadata)
        return dataclasses.replace(trajectory, sample=dataclasses.replace(trajectory.sample, prompt=prompt))

    endless = []
    endless.append(endless)
    for value in (object(), 1 << 70, torch.zeros(2), endless):
        with pytest.raises(ValueError, match="cannot travel"):
            encode_record(with_metadata({"x": value}))
    with pytest.raises(ValueError, match="shorten the prompt"):
        encode_record(with_metadata({"x": "y" * 2000}), RecordLimits(header_bytes=1000))
    with pytest.raises(ValueError, match="the most is 500"):
        encode_record(with_metadata({"x": "y" * 2000}), RecordLimits(record_bytes=500))


# ---- What arrives and is no record -----------------------------------------------------------------------------------

RECORD = TeacherScores(ids=torch.arange(6).view(3, 2), valid=torch.ones(3, 2, dtype=torch.bool))
SPEC = TensorSpec("ids", "int64", [3, 2])


def refused(frames, message, record_type=TeacherScores, **limits):
    with pytest.raises(ChannelError, match=message) as caught:
        decode_record(record_type, frames, sender="teacher-3", limits=RecordLimits(**limits))
    assert caught.value.sender == "teacher-3"


def header(*specs, record="TeacherScores", values=None):
    return msgspec.msgpack.encode(RecordHeader(record, list(specs), values or {}))


IDS = bytes(48)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "no frames"),
        ([b""], "no valid"),
        ([header(SPEC, record="Trajectory"), IDS], "it is a 'Trajectory'"),
        ([header(SPEC)], "0 frames for 1 tensors"),
        ([header(), IDS], "1 frames for 0 tensors"),
        ([header(SPEC), IDS[:-1]], "in 47 bytes"),
        ([header(SPEC), IDS + b"x"], "in 49 bytes"),
        ([header(TensorSpec("ids", "int64", [3, -2])), IDS], ">= 0"),
        ([header(TensorSpec("ids", "int64", [1 << 39, 1 << 39])), IDS], "in 48 bytes"),
        ([header(TensorSpec("ids", "int64", [0, *[(1 << 40) - 1] * 7])), b""], "of shape"),
        ([header(TensorSpec("ids", "complex64", [6])), IDS], "of type 'complex64'"),
        ([header(TensorSpec("ids", "load", [6])), IDS], "of type 'load'"),
        ([header(TensorSpec("__class__", "int64", [3, 2])), IDS], "no place for"),
        ([header(SPEC, SPEC), IDS, IDS], "no place for"),
        ([header(values={"ids": 3})], "a value 'ids'"),
        ([header(values={"__init__": 3})], "no place for"),
        ([header(TensorSpec("valid", "bool", [2])), b"\x01\x02"], "neither true nor false"),
        ([msgspec.msgpack.encode({"type": "RecordHeader", "record": "TeacherScores", "tensors": []})], "values"),
        ([header(*[SPEC] * 65), *[IDS] * 65], "<= 64"),
    ],
)
def test_frames_that_are_no_record(frames, message):
    refused(frames, message)


def test_sizes_are_checked_before_anything_else():
    frames = encode_record(RECORD)
    refused(frames, "the most is 40", record_bytes=40)
    refused(frames, "a header of", header_bytes=10)
    refused(frames, "ids of 48 bytes, the most is 47", frame_bytes=47)


def test_what_must_be_there_is():
    trajectory = make_trajectories(1, vocab_size=50)[0]
    frames = encode_record(trajectory)
    whole = msgspec.msgpack.decode(frames[0], type=RecordHeader)

    def changed(tensors=whole.tensors, **values):
        kept = {name: value for name, value in (whole.values | values).items() if value != "left out"}
        return [msgspec.msgpack.encode(RecordHeader("Trajectory", tensors, kept)), *frames[1 : 1 + len(tensors)]]

    assert_same(decode_record(Trajectory, changed(), sender="peer"), trajectory)
    assert whole.tensors[1].name == "response_ids"
    refused([changed(whole.tensors[:1])[0], frames[1]], "no response_ids", Trajectory)
    refused(changed(finish_reason="left out"), "no finish_reason", Trajectory)
    refused(changed(finish_reason=3), "Expected `str`", Trajectory)
    refused(changed(**{"sample.number": "7"}), "Expected `int`", Trajectory)
    refused(changed(sampling={"temperature": -1.0}), "temperature", Trajectory)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_frames_are_refused_or_still_a_record(data):
    """No byte that changes, is lost or is added leads to anything but a ChannelError or a record of the right types."""
    frames = [bytearray(frame) for frame in encode_record(make_trajectories(1, vocab_size=50, top_k=2)[0])]
    frame = data.draw(st.sampled_from([frame for frame in frames if frame]))
    position = data.draw(st.integers(0, len(frame) - 1))
    match data.draw(st.sampled_from(["change", "cut", "add", "drop a frame", "swap"])):
        case "change":
            frame[position] ^= data.draw(st.integers(1, 255))
        case "cut":
            del frame[position:]
        case "add":
            frame.insert(position, data.draw(st.integers(0, 255)))
        case "drop a frame":
            frames.remove(frame)
        case "swap":
            frames.reverse()
    try:
        record = decode_record(Trajectory, frames, sender="peer")
    except ChannelError:
        return
    assert isinstance(record.response_ids, torch.Tensor)
    assert isinstance(record.sample.number, int)
    assert isinstance(record.finish_reason, str)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=4))
def test_random_frames_are_no_record(frames):
    refused(frames, "teacher-3")


def test_the_size_of_frames_is_that_of_tensors_and_header():
    frames = encode_record(RECORD)
    assert num_bytes(frames) == len(frames[0]) + 48 + 6
