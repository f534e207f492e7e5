"""A run that is killed anywhere and resumed equals the run that was never killed."""

from __future__ import annotations

import itertools
import json
import random
import resource
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.end_to_end.workshop import run_cli
from tests.helpers.processes import CommandProcess
from tests.helpers.runs import assert_same_run, metrics_without_times, trained_numbers
from titan_opd.assemble import assemble
from titan_opd.checkpoint import checkpoint_steps
from titan_opd.observe import read_metrics

STEPS, BATCH = 8, 8
OPTIONS = (
    *("--training.steps", STEPS, "--schedule.batch", BATCH, "--schedule.minibatches", 2),
    *("--schedule.samples_per_prompt", 2, "--data.arithmetic.num_train", 20),  # the second epoch begins in step 6
    *("--optimizer.warmup_steps", 3, "--optimizer.weight_decay", 0.1),
    *("--checkpoint.every", 2, "--checkpoint.keep", 2, "--evaluation.every", 3, "--observe.tensorboard", "true"),
)


@pytest.fixture(scope="module")
def whole(workshop):
    """The run that was never interrupted."""
    return workshop.train("whole", *OPTIONS)


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of that run as it was after step 6 of 8, to be damaged and resumed."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "step-000008")
    return run


IN_BACKGROUND = ("--checkpoint.asynchronous", "true")


def start(workshop, run, *options, **settings):
    """`titan-opd train --resume` in a process; without a checkpoint it begins anew."""
    log = run.with_suffix(".log")
    return CommandProcess(
        "train", workshop.toml, "--run.directory", run, *OPTIONS, "--resume", *options, log=log, **settings
    )


def resume(workshop, run, *options):
    """`titan-opd train --resume` in this process; its exit status."""
    return run_cli("train", workshop.toml, "--run.directory", run, *OPTIONS, "--resume", *options)


def test_whole_run(whole):
    assert trained_numbers(whole) == list(range(STEPS * BATCH))
    assert list(checkpoint_steps(whole)) == [6, 8]
    assert [line["step"] for line in metrics_without_times(whole) if line["kind"] == "evaluation"] == [0, 3, 6, 8]
    assert_every_step_once_in_tensorboard(whole)


def assert_every_step_once_in_tensorboard(run):
    board = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    for kind in ("train/loss", "evaluation/accuracy"):
        section, name = kind.split("/")
        expected = [(line["step"], line[name]) for line in metrics_without_times(run) if line["kind"] == section]
        assert [(scalar.step, pytest.approx(scalar.value)) for scalar in board.Scalars(kind)] == expected


@pytest.mark.slow
def test_killed_before_changes_of_the_disk(workshop, whole, tmp_path):
    """Processes die before their 1st, 5th, 9th, ... change of the file system; what one leaves is what the next finds.

    They reach the middle of everything: claiming the folder, opening the logs, saving, deleting.
    """
    run = tmp_path / "run"
    for change in itertools.count(1, 4):
        process = start(workshop, run, die_at=change)
        status = process.wait()
        if status == 0:
            break
        assert status == -signal.SIGKILL, process.log.read_text()
        assert len(checkpoint_steps(run)) <= 3  # one more than asked for, until the oldest is deleted
    assert change > 30
    assert_same_run(run, whole)
    assert_every_step_once_in_tensorboard(run)


@pytest.mark.slow
def test_killed_at_random_moments(workshop, whole, tmp_path):
    """Killed by the clock, and somewhere in the middle of a save."""
    run = tmp_path / "run"
    random_times = random.Random(0)
    for kill in range(8):
        began = time.time_ns()
        process = start(workshop, run)
        if kill % 2:
            process.wait_until(partial(is_saving, run, since=began))
            time.sleep(random_times.uniform(0, 0.1))
        else:
            time.sleep(random_times.uniform(0.3, 1.0))
        process.kill()
    assert start(workshop, run).wait() == 0
    assert_same_run(run, whole)
    assert_every_step_once_in_tensorboard(run)


def is_saving(run, since):
    """Whether a save is going on that began after `since` (ns): not one that a kill cut short."""
    with suppress(FileNotFoundError):
        return any(path.stat().st_mtime_ns > since for path in run.glob("checkpoints/*.partial"))
    return False


KILLED_ONCE = {
    "policy_gradient": (
        *("--objective.kind", "policy_gradient", "--rollout.num_samples", 3),
        *("--objective.staleness_discount", 0.5),  # shows when the engine forgets which version it holds
    ),
    "hybrid of answers that the student reads": ("--objective.kind", "hybrid", "--rollout.engine", "answers"),
    "hybrid that draws": ("--objective.kind", "hybrid", "--objective.support", "dense", "--rollout.engine", "answers"),
    "cross_entropy": (
        *("--objective.kind", "cross_entropy", "--teacher.engine", "none", "--rollout.engine", "answers"),
        *("--schedule.samples_per_prompt", 1, "--student.initialize", "random"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLED_ONCE)
def test_each_kind_of_run_resumes(workshop, tmp_path, name):
    options = (*KILLED_ONCE[name], "--schedule.samples_per_prompt", 1)
    whole, run = workshop.train(tmp_path / "whole", *OPTIONS, *options), tmp_path / "run"
    process = start(workshop, run, *options)
    assert process.wait_until(lambda: (run / "checkpoints" / "step-000002").exists())
    process.kill()
    assert resume(workshop, run, *options) == 0
    assert_same_run(run, whole)


@pytest.mark.slow
def test_killed_before_the_first_checkpoint(workshop, whole, tmp_path):
    run = tmp_path / "run"
    process = start(workshop, run)
    assert process.wait_until(lambda: (run / "journal.jsonl").exists() and (run / "journal.jsonl").stat().st_size)
    process.kill()
    if checkpoint_steps(run):
        pytest.skip("the machine stopped this process for longer than the run took to its first checkpoint")
    assert resume(workshop, run) == 0
    assert_same_run(run, whole)
    assert_every_step_once_in_tensorboard(run)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_run_with_one_line_that_says_how_to_go_on(workshop, whole, tmp_path, number, status):
    run = tmp_path / "run"
    process = start(workshop, run)
    assert process.wait_until(lambda: (run / "checkpoints" / "step-000002").exists())
    process.send(number)
    assert process.wait() == status
    output = process.log.read_text()
    assert output.endswith(
        "\ntitan-opd train: interrupted; the same command with --resume goes on from the newest checkpoint\n"
    )
    assert "Traceback" not in output
    assert resume(workshop, run) == 0
    assert_same_run(run, whole)


@pytest.mark.slow
def test_a_run_that_is_still_going_on_is_not_resumed(workshop, whole, tmp_path, capsys):
    run = tmp_path / "run"
    process = start(workshop, run)
    assert process.wait_until(lambda: (run / "checkpoints" / "step-000002").exists())
    process.send(signal.SIGSTOP)
    assert resume(workshop, run) == 2
    assert "journal.jsonl: the run is still going on; stop that process first" in capsys.readouterr().err
    process.send(signal.SIGCONT)
    assert process.wait() == 0
    assert_same_run(run, whole)


def test_a_finished_run_trains_nothing_and_shows_its_table_again(workshop, whole, capsys):
    before = {path: path.read_bytes() for path in whole.rglob("*.json*")}
    assert resume(workshop, whole) == 0
    assert {path: path.read_bytes() for path in whole.rglob("*.json*")} == before
    output = capsys.readouterr().out
    assert "after step 0" in output
    assert "after step 8" in output
    assert_every_step_once_in_tensorboard(whole)


def test_what_is_left_of_folders_is_no_checkpoint_and_is_removed(workshop, whole, copy):
    checkpoints = copy / "checkpoints"
    shutil.copytree(checkpoints / "step-000006", checkpoints / "step-000010.partial")
    shutil.copytree(checkpoints / "step-000006", checkpoints / "step-000002.deleted")
    (checkpoints / "step-000002.deleted" / "model.safetensors").unlink()
    assert resume(workshop, copy) == 0
    assert_same_run(copy, whole)


def test_retention_follows_a_changed_setting(workshop, copy):
    assert resume(workshop, copy, "--checkpoint.every", 1, "--checkpoint.keep", 3) == 0
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == [f"step-00000{n}" for n in (6, 7, 8)]


@contextmanager
def file_limit(num_bytes):
    """Writing beyond `num_bytes` of any file fails in this process, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def last_line(text):
    return text.strip().splitlines()[-1]


@pytest.mark.parametrize("options", [(), IN_BACKGROUND])
@pytest.mark.parametrize(
    ("too_large", "share"), [("model.safetensors", 1), ("trainer/__0_0.distcp", 1), ("trainer/__0_0.distcp", 0.75)]
)
def test_a_save_without_room_leaves_the_checkpoint_before_it(workshop, whole, copy, too_large, share, options, capsys):
    step_6, step_8 = (copy / "checkpoints" / f"step-{step:06d}" for step in (6, 8))
    with file_limit(int(share * (step_6 / too_large).stat().st_size) - 1):
        assert resume(workshop, copy, *options) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"titan-opd train: error: {step_8} could not be written (")
    assert "File too large" in error
    assert error.endswith(f"); {step_6} is intact. Make room, then go on with --resume\n")
    assert error.count("\n") == 1
    assert list((copy / "checkpoints").iterdir()) == [step_6]
    assert resume(workshop, copy) == 0
    assert [*checkpoint_steps(copy)] == [6, 8]
    assert_same_run(copy, whole)


def test_saves_in_the_background_write_what_others_write(workshop, whole, tmp_path):
    run = workshop.train(tmp_path / "run", *OPTIONS, *IN_BACKGROUND)
    assert_same_run(run, whole)
    lines = read_metrics(run, "train")
    written = [line["seconds/checkpoint_write"] for line in lines if "seconds/checkpoint_write" in line]
    assert 1 <= len(written) <= 3  # that of the last step ends after the last line
    assert all(line["seconds/checkpoint"] > 0 for line in lines if line["step"] in (3, 5, 7))


def test_a_first_save_without_room(workshop, tmp_path, capsys):
    with file_limit(60_000):
        assert run_cli("train", workshop.toml, "--run.directory", tmp_path / "run", *OPTIONS) == 1
    assert "there is no earlier one" in capsys.readouterr().err
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_log_without_room(workshop, whole, copy, capsys):
    with file_limit((copy / "journal.jsonl").stat().st_size - 500):
        assert resume(workshop, copy) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"titan-opd train: error: cannot write to {copy}/")
    assert "go on with --resume" in error
    assert error.count("\n") == 1
    assert resume(workshop, copy) == 0
    assert_same_run(copy, whole)


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for one checkpoint of these runs and a half."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", folder]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user cannot mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(workshop, whole, small_disk, capsys):
    run = small_disk / "run"
    assert run_cli("train", workshop.toml, "--run.directory", run, *OPTIONS) == 1
    error = capsys.readouterr().err
    step_2, step_4 = (run / "checkpoints" / f"step-{step:06d}" for step in (2, 4))
    assert f"{step_4} could not be written" in error
    assert f"No space left on device); {step_2} is intact" in error
    subprocess.run(["mount", "-o", "remount,size=6m", small_disk], check=True)
    assert resume(workshop, run) == 0
    assert_same_run(run, whole)


def test_changed_settings_are_refused_by_name(workshop, whole, capsys):
    before = (whole / "journal.jsonl").read_bytes()
    changes = ("--optimizer.learning_rate", 0.5, "--rollout.sampling.max_new_tokens", 9)
    assert resume(workshop, whole, *changes) == 2
    error = last_line(capsys.readouterr().err)
    assert f"cannot resume {whole}: " in error
    assert "rollout.sampling.max_new_tokens, optimizer.learning_rate differ from the run's config.toml" in error
    assert (whole / "journal.jsonl").read_bytes() == before


def test_free_settings_may_change(workshop, whole, copy):
    moved = copy.rename(copy.with_name("moved"))
    free = ("--evaluation.every", 1, "--observe.tensorboard", "false", "--checkpoint.every", 0)
    assert resume(workshop, moved, *free) == 0
    assert (moved / "journal.jsonl").read_bytes() == (whole / "journal.jsonl").read_bytes()
    step_8 = Path("checkpoints", "step-000008", "model.safetensors")
    assert (moved / step_8).read_bytes() == (whole / step_8).read_bytes()


@pytest.mark.parametrize("there", ["a checkpoint", "nothing"])
def test_a_run_that_another_process_changed_meanwhile_is_left_alone(workshop, whole, copy, there, monkeypatch, capsys):
    """The other one has begun and ended while this one read its models."""
    if there == "nothing":
        shutil.rmtree(copy)

    def assemble_slowly(*arguments, **options):
        shutil.copytree(whole, copy, dirs_exist_ok=True)
        return assemble(*arguments, **options)

    monkeypatch.setattr("titan_opd.train.assemble", assemble_slowly)
    assert resume(workshop, copy) == 2
    error = capsys.readouterr().err
    began = 6 if there == "a checkpoint" else 0
    assert f"another process has changed the run since this one began, from step {began} to step 8" in error
    assert_same_run(copy, whole)


def test_another_run_that_began_meanwhile_is_left_alone(workshop, whole, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"

    def assemble_slowly(*arguments, **options):
        run.mkdir()
        shutil.copy(whole / "config.toml", run)
        return assemble(*arguments, **options)

    monkeypatch.setattr("titan_opd.train.assemble", assemble_slowly)
    options = (*OPTIONS, "--optimizer.learning_rate", 0.5)
    assert run_cli("train", workshop.toml, "--run.directory", run, *options) == 2
    assert "optimizer.learning_rate differ from the run's config.toml" in capsys.readouterr().err
    assert [path.name for path in run.iterdir()] == ["config.toml"]


def test_a_run_is_not_overwritten(workshop, whole, capsys):
    assert run_cli("train", workshop.toml, "--run.directory", whole, *OPTIONS) == 2
    assert "already holds a run; go on with it by --resume" in capsys.readouterr().err


def test_checkpoints_of_unknown_settings_are_refused(workshop, copy, capsys):
    (copy / "config.toml").unlink()
    for options in ([], ["--resume"]):
        assert run_cli("train", workshop.toml, "--run.directory", copy, *OPTIONS, *options) == 2
        assert "holds checkpoints but no config.toml" in capsys.readouterr().err


def test_the_teacher_stays_the_one_that_the_run_began_with(workshop, whole, tmp_path, capsys):
    """A teacher that is named by its run, which goes on meanwhile and gets a newer checkpoint."""
    teacher, run = tmp_path / "teacher", tmp_path / "run"
    shutil.copytree(workshop.folder / "teacher", teacher / "checkpoints" / "step-000001")
    options = (*OPTIONS, "--teacher.path", teacher, "--run.directory", run)
    assert run_cli("train", workshop.toml, *options) == 0
    assert run_cli("train", workshop.toml, *options, "--resume") == 0
    shutil.copytree(workshop.folder / "teacher", teacher / "checkpoints" / "step-000002")
    assert run_cli("train", workshop.toml, *options, "--resume") == 2
    assert f"cannot resume {run}: teacher.path differ" in capsys.readouterr().err


DAMAGES = {
    "no trainer state": lambda checkpoint: shutil.rmtree(checkpoint / "trainer"),
    "no state.json": lambda checkpoint: (checkpoint / "trainer" / "state.json").unlink(),
    "state.json without its keys": lambda checkpoint: (checkpoint / "trainer" / "state.json").write_text("{}"),
    "half of state.json": lambda checkpoint: halve(checkpoint / "trainer" / "state.json"),
    "no .metadata": lambda checkpoint: (checkpoint / "trainer" / ".metadata").unlink(),
    "half of .metadata": lambda checkpoint: halve(checkpoint / "trainer" / ".metadata"),
    "no shard": lambda checkpoint: (checkpoint / "trainer" / "__0_0.distcp").unlink(),
    "half of a shard": lambda checkpoint: halve(checkpoint / "trainer" / "__0_0.distcp"),
    "half of the weights": lambda checkpoint: halve(checkpoint / "model.safetensors"),
    "no weights": lambda checkpoint: (checkpoint / "model.safetensors").unlink(),
    "no config.json": lambda checkpoint: (checkpoint / "config.json").unlink(),
    "half of the tokenizer": lambda checkpoint: halve(checkpoint / "tokenizer.json"),
    "nothing in the folder": lambda checkpoint: empty(checkpoint),
    "a file": lambda checkpoint: (shutil.rmtree(checkpoint), checkpoint.touch()),
}


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def halve(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused(workshop, copy, damage, capsys, caplog):
    checkpoint = copy / "checkpoints" / "step-000006"
    DAMAGES[damage](checkpoint)
    before = (copy / "journal.jsonl").read_bytes()
    assert resume(workshop, copy) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert not [record for record in caplog.records if record.name == "root"]  # torch's, with tracebacks
    assert f"cannot resume from {checkpoint}: " in error
    assert "delete that folder to go on from the checkpoint before it" in error
    assert (copy / "journal.jsonl").read_bytes() == before


@pytest.mark.parametrize("log", ["journal.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize("left", ["nothing", "fewer lines", "other lines"])
def test_logs_that_lack_what_the_checkpoint_has_seen_are_refused(workshop, copy, log, left, capsys):
    file = copy / log
    state = json.loads((copy / "checkpoints" / "step-000006" / "trainer" / "state.json").read_text())
    cut = state["journal_bytes" if log.startswith("journal") else "metrics_bytes"]
    if left == "nothing":
        file.unlink()
    elif left == "fewer lines":
        file.write_bytes(file.read_bytes()[: cut - 1])
    else:
        file.write_bytes(b" " + file.read_bytes())
    assert resume(workshop, copy) == 2
    error = capsys.readouterr().err
    assert f"{file} had {cut} bytes when the checkpoint was taken" in error
    assert error.count("\n") == 1
