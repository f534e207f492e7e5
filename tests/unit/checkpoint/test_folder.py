"""Folders and files that are there whole or not at all, and which checkpoints are kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_opd.checkpoint import checkpoint_steps, model_folder, pick_checkpoint, remove_remains, write_file
from titan_opd.checkpoint.folder import atomic_folder, checkpoint_folder, remove_old_checkpoints
from titan_opd.checkpoint.together import Together
from titan_opd.parallel import open_world


def make_checkpoints(run, steps, suffix=""):
    for step in steps:
        folder = checkpoint_folder(run, step)
        folder = folder.with_name(folder.name + suffix)
        (folder / "trainer").mkdir(parents=True)
        (folder / "trainer" / "state.json").write_text("{}")


@pytest.fixture
def together():
    with open_world():
        yield Together()


def test_an_atomic_folder_has_its_name_after_the_block_only(tmp_path, together):
    final = tmp_path / "deep" / "folder"
    with atomic_folder(final, together) as folder:
        (folder / "file").write_text("content")
        assert not final.exists()
    assert [path.name for path in final.parent.iterdir()] == ["folder"]
    assert (final / "file").read_text() == "content"


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path, together, error):
    def fail():
        with atomic_folder(tmp_path / "folder", together) as folder:
            (folder / "file").write_text("content")
            raise error

    with pytest.raises(error):
        fail()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_does_not_get_into_the_folder(tmp_path, together):
    (tmp_path / "folder.partial").mkdir()
    (tmp_path / "folder.partial" / "old").write_text("half")
    with atomic_folder(tmp_path / "folder", together) as folder:
        (folder / "new").write_text("content")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["new"]


@pytest.fixture
def disk_order(monkeypatch):
    """What is brought onto the disk and what is renamed, in order."""
    order = []
    fsync, rename = os.fsync, Path.rename

    def record_fsync(descriptor):
        order.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    def record_rename(path, target):
        order.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    monkeypatch.setattr(Path, "replace", record_rename)
    return order


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, together, disk_order):
    """A power failure must not leave the name without the files."""
    with atomic_folder(tmp_path / "folder", together) as folder:
        (folder / "inner").mkdir()
        for name in ("file", "inner/file"):
            (folder / name).write_text("content")
    renamed = disk_order.index("rename")
    assert set(disk_order[:renamed]) == {folder, folder / "file", folder / "inner", folder / "inner" / "file"}
    assert disk_order[renamed + 1 :] == [tmp_path]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, disk_order):
    write_file(tmp_path / "file", "content")
    assert disk_order == [tmp_path / "file.partial", "rename", tmp_path]


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path):
    write_file(tmp_path / "file", "before")
    with pytest.raises(UnicodeEncodeError):
        write_file(tmp_path / "file", "after \ud800")
    assert (tmp_path / "file").read_text() == "before"
    write_file(tmp_path / "file", "after")
    assert (tmp_path / "file").read_text() == "after"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_checkpoints_are_found_by_their_whole_name(tmp_path):
    make_checkpoints(tmp_path, [20, 3, 1_000_000])
    make_checkpoints(tmp_path, [1, 30], ".partial")
    make_checkpoints(tmp_path, [2], ".deleted")
    (tmp_path / "checkpoints" / "step-best").mkdir()
    assert list(checkpoint_steps(tmp_path)) == [3, 20, 1_000_000]
    assert pick_checkpoint(tmp_path).name == "step-1000000"
    assert pick_checkpoint(tmp_path, 20).name == "step-000020"
    with pytest.raises(ValueError, match=r"no checkpoint of step 30 under .*; there are 3, 20, 1000000"):
        pick_checkpoint(tmp_path, 30)


def test_a_run_without_a_checkpoint(tmp_path):
    assert checkpoint_steps(tmp_path) == {}
    make_checkpoints(tmp_path, [1], ".partial")
    with pytest.raises(ValueError, match=r"no complete checkpoint under .*; the run stopped before its first"):
        model_folder(str(tmp_path))


@given(
    steps=st.sets(st.integers(1, 2_000_000), max_size=6),
    partial=st.sets(st.integers(1, 99), max_size=2),
    deleted=st.sets(st.integers(1, 99), max_size=2),
    keep=st.integers(1, 4),
)
@settings(max_examples=50, deadline=None)
def test_the_newest_are_kept_and_remains_are_removed(tmp_path_factory, steps, partial, deleted, keep):
    run = tmp_path_factory.mktemp("run")
    make_checkpoints(run, steps)
    make_checkpoints(run, partial, ".partial")
    make_checkpoints(run, deleted - steps, ".deleted")  # a step has no checkpoint while its old one is being deleted
    remove_old_checkpoints(run, keep)
    folders = list((run / "checkpoints").iterdir()) if (run / "checkpoints").exists() else []
    assert set(folders) == {checkpoint_folder(run, step) for step in sorted(steps)[-keep:]}
    assert all((folder / "trainer" / "state.json").exists() for folder in folders)
    shutil.rmtree(run)


def test_only_remains_are_removed(tmp_path):
    make_checkpoints(tmp_path, [1, 2, 3])
    make_checkpoints(tmp_path, [4], ".partial")
    remove_remains(tmp_path)
    assert list(checkpoint_steps(tmp_path)) == [1, 2, 3]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


def test_a_checkpoint_loses_its_name_before_its_files(tmp_path, monkeypatch):
    """A process that dies while it deletes leaves no checkpoint without files."""
    make_checkpoints(tmp_path, [1, 2, 3])

    def die(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        remove_old_checkpoints(tmp_path, 1)
    assert list(checkpoint_steps(tmp_path)) == [3]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000001.deleted", "step-000002.deleted", "step-000003"]
