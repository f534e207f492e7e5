"""Files of JSON lines: any cut and continuation, and what stands in the way of writing."""

from __future__ import annotations

import resource

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_opd.errors import StorageError
from titan_opd.observe.lines import LineFile, read_lines

RECORDS = st.lists(
    st.dictionaries(st.text(max_size=5), st.integers() | st.floats(allow_nan=False) | st.text(max_size=5), max_size=3),
    min_size=1,
    max_size=8,
)


def write(path, records, keep_bytes=0):
    """Write lines; the length after each."""
    file = LineFile(path, keep_bytes=keep_bytes)
    lengths = [file.sync()]
    for record in records:
        file.write_line(record)
        lengths.append(file.sync())
    file.close()
    return lengths


@given(RECORDS, st.data())
@settings(max_examples=60, deadline=None)
def test_a_cut_and_its_continuation_equal_the_uncut_file(tmp_path_factory, records, data):
    path = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    lengths = write(path, records)
    whole = path.read_bytes()
    assert read_lines(path) == records

    kept = data.draw(st.integers(0, len(records)), label="lines kept")
    # What stands after the cut: the rest of the first time, perhaps ending in the middle of a line, or something else.
    end = data.draw(st.integers(lengths[kept], len(whole)), label="where the killed process stopped")
    path.write_bytes(whole[:end] + data.draw(st.binary(max_size=20), label="torn line"))
    write(path, records[kept:], keep_bytes=lengths[kept])
    assert path.read_bytes() == whole


@given(RECORDS, st.data())
@settings(max_examples=30, deadline=None)
def test_half_a_last_line_is_not_read(tmp_path_factory, records, data):
    path = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    lengths = write(path, records)
    end = data.draw(st.integers(0, lengths[-1]))
    path.write_bytes(path.read_bytes()[:end])
    assert read_lines(path) == records[: sum(length <= end for length in lengths) - 1]


def test_each_line_is_in_the_file_at_once(tmp_path):
    file = LineFile(tmp_path / "lines.jsonl")
    file.write_line({"a": 1})
    assert read_lines(tmp_path / "lines.jsonl") == [{"a": 1}]
    file.close()


@pytest.mark.parametrize("content", [b"", b'{"a": 1}', b'{"a": 10}\n', b' {"a": 1}\n'])
def test_a_file_without_the_lines_that_it_had_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "lines.jsonl"
    _, length = write(path, [{"a": 1}])
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"lines.jsonl had {length} bytes .* it has {len(content)}"):
        LineFile(path, keep_bytes=length)
    assert path.read_bytes() == content


def test_one_writer_at_a_time(tmp_path):
    path = tmp_path / "lines.jsonl"
    first = LineFile(path)
    first.write_line({"a": 1})
    with pytest.raises(ValueError, match=r"another process is writing to .*lines.jsonl"):
        LineFile(path)
    assert read_lines(path) == [{"a": 1}]
    first.close()
    LineFile(path).close()
    assert read_lines(path) == []


def test_a_file_system_without_locks_is_told_of(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.warns(UserWarning, match=r"lines.jsonl cannot be locked .*Function not implemented"):
        file = LineFile(tmp_path / "lines.jsonl")
    file.write_line({"a": 1})
    file.close()
    assert read_lines(tmp_path / "lines.jsonl") == [{"a": 1}]


def test_no_room_for_a_line(tmp_path):
    path = tmp_path / "lines.jsonl"
    file = LineFile(path)
    file.write_line({"a": 1})
    length = file.sync()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length + 5, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"cannot write to .*lines.jsonl .*File too large.*--resume"):
            file.write_line({"b": 2})
        with pytest.raises(OSError, match="File too large"):
            file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_lines(path) == [{"a": 1}]
    assert write(path, [{"b": 3}], keep_bytes=length)
    assert read_lines(path) == [{"a": 1}, {"b": 3}]


def test_a_folder_that_is_missing(tmp_path):
    with pytest.raises(StorageError, match="No such file or directory"):
        LineFile(tmp_path / "nowhere" / "lines.jsonl")
