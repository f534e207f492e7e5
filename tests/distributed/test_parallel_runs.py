"""Whole runs by two processes that split every matrix: written, trained, saved, and resumed from another layout."""

from __future__ import annotations

import shutil

import pytest

from tests.end_to_end.workshop import make_workshop
from tests.helpers.processes import start_ranks
from tests.helpers.runs import assert_close_run, trained_numbers
from titan_opd.checkpoint import checkpoint_steps

pytestmark = pytest.mark.slow  # processes that import everything

OPTIONS = (
    *("--training.steps", 4, "--schedule.minibatches", 2, "--evaluation.every", 2),
    *("--checkpoint.every", 2, "--checkpoint.keep", 3, "--journal.payload", "true"),
    *("--optimizer.eps", 1e-3),  # a small one makes steps of full size out of the rounding of a gradient of 0
)
SPLIT = ("--parallel.tp", 2, "--parallel.sequence_parallel", "true", "--training.recompute_activations", "selective")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    return make_workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="module")
def lone(workshop):
    """The run of one process."""
    return workshop.train("lone", *OPTIONS)


def run_split(workshop, run, *options):
    arguments = ("train", workshop.toml, "--run.directory", run, *OPTIONS, *options, "--resume")
    log = workshop.folder / f"{run.name}.log"
    assert [process.wait() for process in start_ranks(*arguments, log=log)] == [0, 0], log.read_text()[-3000:]
    return run


def test_a_run_is_that_of_one_process(workshop, lone):
    run = run_split(workshop, workshop.folder / "split", *SPLIT)
    assert trained_numbers(run) == trained_numbers(lone)
    assert_close_run(run, lone)
    payloads = sorted(path.name for path in run.rglob("*.samples") if "checkpoints" not in path.parts)
    assert len(payloads) == 4, "what both processes trained is written by one"


@pytest.mark.parametrize("split", [(), SPLIT], ids=["fsdp", "tp"])
def test_a_run_whose_processes_share_the_teacher_too(workshop, lone, split, request):
    folder = workshop.folder / f"shared-{request.node.callspec.id}"
    run = run_split(workshop, folder, *split, "--teacher.sharded", "true")
    assert trained_numbers(run) == trained_numbers(lone)
    assert_close_run(run, lone)


def test_a_run_of_one_process_goes_on_split(workshop, lone):
    run = shutil.copytree(lone, workshop.folder / "moved")
    shutil.rmtree(checkpoint_steps(run)[4])
    run_split(workshop, run, *SPLIT[:2])
    assert_close_run(run, lone)


def test_a_split_run_with_overlapping_roles_trains_every_sample_once(workshop):
    run = run_split(workshop, workshop.folder / "async", *SPLIT, "--schedule.mode", "async")
    assert sorted(trained_numbers(run)) == list(range(32))
