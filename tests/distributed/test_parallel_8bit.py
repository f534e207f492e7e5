"""Moments of 8 bits, shared by two processes: trained, saved, and resumed to the bit; what cannot be resumed."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest
import torch

from tests.distributed.cases import make_batches, uneven_trajectories
from tests.distributed.parallel_cases import CHECKPOINTED, OBJECTIVES, SMOOTH, make_model, take_step
from tests.helpers.worlds import run_world
from titan_opd.checkpoint import checkpoint_steps
from titan_opd.config.schema import ParallelConfig
from titan_opd.learner import Learner
from titan_opd.parallel import open_world
from titan_opd.weights import named_weights

pytestmark = pytest.mark.slow  # two more processes import everything

EIGHT_BIT = replace(SMOOTH, name="adamw_8bit")
SHAPE = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 16}  # some shards have whole blocks, some do not
LAYOUTS = {"fsdp": ParallelConfig(), "tp": ParallelConfig(tp=2)}
NUM_STEPS = 3


def train_uninterrupted(world, parallel, optimizer):
    """Weights after `NUM_STEPS` steps, and which moments have 8 bits."""
    model = make_model(CHECKPOINTED, world.mesh, parallel, **SHAPE)
    objective = OBJECTIVES["forward_kl"]
    learner = Learner(model, objective, optimizer, num_steps=5, seed=0, world=world, parallel=parallel)
    for step in range(NUM_STEPS):
        learner.step(make_batches(uneven_trajectories(step)[:8], objective, world), current_version=step)
    coarse = {
        name
        for name, parameter in model.decoder.named_parameters()
        if hasattr(learner.optimizer.state[parameter]["exp_avg"].to_local(), "codes")
    }
    return dict(named_weights(model.decoder)), coarse


def train_step_by_step(folder, world, parallel, first=0):
    """The last weights of a run that is resumed at every step."""
    return [take_step(folder, place, world, parallel, EIGHT_BIT, **SHAPE) for place in range(first, NUM_STEPS)][-1][
        "weights"
    ]


def train_everywhere(folder):
    """In the world that there is; the run of one process in `folder` is there already."""
    torch.compiler.set_stance("force_eager")  # compiling takes minutes
    found = {}
    for layout, parallel in LAYOUTS.items():
        with open_world(parallel) as world:
            whole, coarse = train_uninterrupted(world, parallel, EIGHT_BIT)
            resumed = train_step_by_step(folder / layout, world, parallel)
            found[layout] = {"whole": whole, "resumed": resumed, "coarse": coarse}
    with open_world(LAYOUTS["fsdp"]) as world:
        found["spread"] = train_step_by_step(folder / "spread", world, LAYOUTS["fsdp"], first=1)
    with open_world(LAYOUTS["tp"]) as world, pytest.raises(ValueError, match="cannot resume") as refusal:
        train_step_by_step(folder / "cut", world, LAYOUTS["tp"], first=1)
    return found | {"refusal": str(refusal.value)}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of one process, and of each of two."""
    folder = tmp_path_factory.mktemp("runs")
    torch.compiler.set_stance("force_eager")
    try:
        with open_world() as world:
            alone = {"exact": train_uninterrupted(world, ParallelConfig(), SMOOTH)[0]}
            alone["whole"], alone["coarse"] = train_uninterrupted(world, ParallelConfig(), EIGHT_BIT)
            for run in ("spread", "cut"):
                take_step(folder / run, 0, world, ParallelConfig(), EIGHT_BIT, **SHAPE)
            pair = run_world(train_everywhere, folder, size=2, folder=tmp_path_factory.mktemp("world"))
            for layout in LAYOUTS:
                shutil.rmtree(checkpoint_steps(folder / layout)[NUM_STEPS])  # its last step is to be taken again
            alone["gathered"] = train_step_by_step(folder / "fsdp", world, ParallelConfig(), first=NUM_STEPS - 1)
            with pytest.raises(ValueError, match="cannot resume") as refusal:
                train_step_by_step(folder / "tp", world, ParallelConfig(), first=NUM_STEPS - 1)
    finally:
        torch.compiler.set_stance("default")
    return alone | {"refusal": str(refusal.value)}, pair


def assert_near(left, right, atol):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=atol, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_is_resumed_at_every_step_is_the_uninterrupted_one_to_the_bit(results, layout):
    for rank in results[1]:
        assert rank[layout]["coarse"], "no moment has 8 bits"
        for name, weight in rank[layout]["whole"].items():
            assert torch.equal(rank[layout]["resumed"][name], weight), name


# Of three steps of at most 3e-3 each: 8-bit moments are rounded by some percent, elsewhere where other blocks are.
BAND = 5e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_train_nearly_as_one_and_one_nearly_as_with_32_bits(results, layout):
    alone, pair = results
    moved = max(float((alone["exact"][name] - alone["whole"][name]).abs().max()) for name in alone["exact"])
    assert 1e-6 < moved < BAND
    assert pair[0][layout]["coarse"] < alone["coarse"], "shards below 4096 elements keep 32 bits"
    assert_near(pair[0][layout]["whole"], alone["whole"], BAND)


def test_a_run_goes_on_on_more_and_on_fewer_processes_that_share_whole_blocks(results):
    alone, pair = results
    assert_near(pair[0]["spread"], alone["whole"], BAND)
    assert_near(alone["gathered"], alone["whole"], BAND)


def test_where_blocks_would_be_cut_it_is_refused(results):
    for found in (results[0], *results[1]):
        assert re.search(r"cannot resume from .*step-.* would have to cut blocks .* same axes in", found["refusal"])
