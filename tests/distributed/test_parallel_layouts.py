"""However the processes share the student, it is loaded, trained and saved as in one process."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.distributed.parallel_cases import (
    ALL_AXES,
    ALL_AXES_CASES,
    ALL_CASES,
    CHAIN,
    LAYOUTS,
    NARROW_LAYOUTS,
    NUM_GROUPS,
    NUM_MICRO_BATCHES,
    NUM_STEPS,
    OPTIMIZERS,
    RECOMPUTING,
    STUDENTS,
    cases_of,
    go_on,
    make_student,
    run_everything,
    train_on_all_axes,
)
from tests.helpers.worlds import run_world
from titan_opd.checkpoint import checkpoint_steps
from titan_opd.checkpoint.export import export_model
from titan_opd.models import load_decoder, save_decoder
from titan_opd.parallel import open_world

pytestmark = pytest.mark.slow  # many more processes import everything

EVERYWHERE = [(size, layout) for size, layouts in LAYOUTS.items() for layout in layouts]
TRAINED = [(*place, *case) for place in EVERYWHERE for case in cases_of(place[1])]
WIDE = {"hidden_size": 128, "intermediate_size": 192}  # what is made beside the weights does not count then


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of every student in Hugging Face format."""
    folder = tmp_path_factory.mktemp("students")
    for student in STUDENTS:
        save_decoder(make_student(student, **WIDE), folder / student)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    return run_everything(folder)


@pytest.fixture(scope="module")
def worlds(folder, tmp_path_factory):
    """What each process of each world found."""
    return {
        size: run_world(run_everything, folder, size=size, folder=tmp_path_factory.mktemp(f"of-{size}"))
        for size in LAYOUTS
    }


def assert_close(left, right, atol=1e-5):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=atol, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def assert_same_training(result, expected, weights=1e-5, metrics=1e-5):
    """Gradients, all metrics and weights after the last step agree."""
    assert len(expected["steps"]) == NUM_STEPS
    assert_close(result["gradients"], expected["gradients"])
    assert_close(result["weights"], expected["weights"], atol=weights)
    for step, expected_step in zip(result["steps"], expected["steps"], strict=True):
        assert comparable(step) == pytest.approx(comparable(expected_step), rel=metrics, abs=metrics)


def distance(left, right):
    """Of a parameter's gradients relative to the right one's norm, for the parameter where it is largest."""
    return max(float((left[name] - right[name]).norm() / right[name].norm()) for name in right)


def losses(result):
    return [metrics["loss"] for metrics in result["steps"]]


def comparable(metrics):
    """Without a quotient of means, which depends on how a batch is cut."""
    return {name: value for name, value in metrics.items() if name != "effective_sample_share"}


@pytest.mark.parametrize(("size", "layout", "student", "kind"), TRAINED)
def test_training_is_that_of_one_process(alone, worlds, size, layout, student, kind):
    for result in (rank["trained"][layout, student, kind] for rank in worlds[size]):
        assert_same_training(result, alone["trained"]["alone", student, kind])


@pytest.mark.parametrize("layout", ["fsdp", "tp", "fsdp x tp", "hsdp"])
def test_every_objective_and_every_student_is_trained_on_each_axis(layout):
    students, kinds = (set(names) for names in zip(*cases_of(layout), strict=True))
    assert students == set(STUDENTS)
    assert {"forward_kl", "reverse_kl", "policy_gradient", "hybrid"} <= kinds


def test_two_copies_of_two_shards_of_two_parts_train_as_one_process(alone, tmp_path):
    size = ALL_AXES.dp_replicate * ALL_AXES.dp_shard * ALL_AXES.tp
    for rank in run_world(train_on_all_axes, size=size, folder=tmp_path):
        for case in ALL_AXES_CASES:
            student, kind = case
            assert_same_training(rank[case], alone["trained"]["alone", student, kind])


NARROW_PLACES = [(size, layout) for size, layouts in NARROW_LAYOUTS.items() if size > 1 for layout in layouts]


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(("size", "layout"), NARROW_PLACES)
def test_float8_rounds_on_every_layout_as_in_one_process(alone, worlds, size, layout, kind):
    """Its scales are powers of two: which tokens share one does not show. A sum that is rounded otherwise can: a number
    between two of float8's falls to the other side, in the last steps."""
    for result in (rank["narrow"][layout][kind] for rank in worlds[size]):
        assert_same_training(result, alone["narrow"]["alone"][kind], weights=1e-4, metrics=1e-3)


@pytest.mark.parametrize(("size", "layout"), NARROW_PLACES)
def test_bfloat16_differs_among_layouts_less_than_from_float32(alone, worlds, size, layout):
    """bfloat16 has 8 bits: a number is rounded by up to 1/256 of itself, a gradient here by 2 % on average."""
    expected = alone["narrow"]["alone"]
    for result in (rank["narrow"][layout]["bfloat16"] for rank in worlds[size]):
        assert distance(result["gradients"], expected["bfloat16"]["gradients"]) < 0.03
        assert 0.02 < distance(result["gradients"], expected["float32"]["gradients"]) < 0.1
        for reference in ("bfloat16", "float32"):
            assert losses(result) == pytest.approx(losses(expected[reference]), rel=0.01)
            assert_close(result["weights"], expected[reference]["weights"], atol=2e-3)


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_float8_is_near_float32(alone, kind):
    """Its numbers have 4 bits or 3: they are rounded by up to 1/16, or 1/8, of themselves."""
    result, expected = (alone["narrow"]["alone"][name] for name in (kind, "float32"))
    assert 0.1 < distance(result["gradients"], expected["gradients"]) < 0.4
    assert losses(result) == pytest.approx(losses(expected), rel=0.05)
    assert_close(result["weights"], expected["weights"], atol=1e-2)


@pytest.mark.parametrize(("student", "kind"), ALL_CASES)
def test_every_weight_is_trained(alone, student, kind):
    for name, gradient in alone["trained"]["alone", student, kind]["gradients"].items():
        # A key's bias adds the same to all scores of a query as long as positions do not turn it: nearly nothing.
        assert name.endswith("k_proj.bias") or gradient.abs().max() > 1e-5, name


@pytest.mark.parametrize("student", STUDENTS)
@pytest.mark.parametrize(("size", "layout"), EVERYWHERE)
def test_each_process_reads_its_shards_and_nothing_else(worlds, size, layout, student):
    expected = make_student(student, **WIDE)
    drawn = make_student(student, **WIDE)
    drawn.init_weights(torch.Generator().manual_seed(3))
    whole = sum(parameter.nbytes for parameter in expected.parameters())
    share = size // LAYOUTS[size][layout].dp_replicate
    for result in (rank["loaded"][layout, student] for rank in worlds[size]):
        assert_equal(result["loaded"], dict(expected.named_parameters()))
        assert_equal(result["drawn"], dict(drawn.named_parameters()))
        assert whole / share * 0.9 < result["own"] < whole / share * 1.1
        assert result["on meta"] < 0.02 * whole
        assert result["allocated"] < 1.15 * result["own"] + 0.02 * whole


@pytest.mark.parametrize("size", LAYOUTS)
def test_gradients_cross_the_processes_once_a_step(worlds, size):
    counts = {layout: found["calls"] for layout, found in worlds[size][0]["communication"].items()}
    if size == 2:
        gathers = NUM_GROUPS + NUM_GROUPS - 1  # the vocabulary stays from the forward pass to the backward one
        assert counts["fsdp"] == {"all_gather": gathers * NUM_MICRO_BATCHES, "reduce_scatter": NUM_GROUPS}
        assert counts["gathered, prefetched"] == {"all_gather": NUM_GROUPS, "reduce_scatter": NUM_GROUPS}
        assert counts["reduced each time"]["reduce_scatter"] == NUM_GROUPS * NUM_MICRO_BATCHES
        assert counts["hsdp"] == {"all_reduce": NUM_GROUPS}
    else:
        assert counts["hsdp"]["reduce_scatter"] == counts["hsdp"]["all_reduce"] == NUM_GROUPS
        each_time = counts["hsdp, reduced each time"]
        assert each_time["reduce_scatter"] == NUM_GROUPS * NUM_MICRO_BATCHES
        assert each_time["all_reduce"] == NUM_GROUPS, "copies exchange gradients after the last micro-batch only"


@pytest.mark.parametrize("layout", ["fsdp", "tp, sequence"])
def test_what_is_computed_again_is_the_same_to_the_bit(worlds, layout):
    for rank in worlds[2]:
        plain, *others = (rank["recomputed"][layout][mode] for mode in RECOMPUTING)
        for other in others:
            assert other["steps"] == plain["steps"]
            assert_equal(other["gradients"], plain["gradients"])
            assert_equal(other["weights"], plain["weights"])


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A run that goes on, step by step, on other meshes, and the same run on one process."""
    moving, staying = tmp_path_factory.mktemp("moving"), tmp_path_factory.mktemp("staying")
    found = []
    for place, (data, tensor) in enumerate(CHAIN):
        world = tmp_path_factory.mktemp(f"world-{place}")
        (*_, moved) = (
            run_world(go_on, moving, (data, tensor), place, size=data * tensor, folder=world)
            if data * tensor > 1
            else [go_on(moving, (data, tensor), place)]
        )
        found.append((moved, go_on(staying, (1, 1), place)))
    return moving, found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_goes_on_on_another_mesh_exactly(chain, optimizer):
    _, found = chain
    for (before, _), (after, _) in itertools.pairwise(found):
        assert_equal(after[optimizer]["loaded"], before[optimizer]["weights"])
    for moved, stayed in found:
        assert moved[optimizer]["loss"] == pytest.approx(stayed[optimizer]["loss"], abs=1e-6)
        assert_close(moved[optimizer]["weights"], stayed[optimizer]["weights"], atol=1e-6)


def test_every_mesh_writes_a_model_that_can_be_exported(chain, tmp_path):
    folder, found = chain
    for step, checkpoint in checkpoint_steps(folder / "adamw").items():
        with open_world() as world:
            export_model(checkpoint, tmp_path / str(step), torch.float32, world=world)
        exported = load_decoder(tmp_path / str(step))
        assert_equal(dict(exported.named_parameters()), found[step - 1][0]["adamw"]["weights"])
