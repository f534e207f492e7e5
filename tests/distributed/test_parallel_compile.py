"""Compiled layers train as the others do, whatever the lengths of a batch: only the rounding of fused sums differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.distributed.cases import first_gradients, make_batches, uneven_trajectories
from tests.distributed.parallel_cases import LAYOUTS, NARROW, OBJECTIVES, TRAINING, make_model, make_student
from tests.helpers.arithmetic import VOCAB_SIZE
from tests.helpers.worlds import run_world
from titan_opd.learner import DistillationModel
from titan_opd.parallel import open_world, parallelize

pytestmark = pytest.mark.slow  # compiling takes most of a minute


@pytest.fixture(scope="module", params=[{}, {"recompute_activations": "full", "float8": NARROW["rowwise"].float8}])
def found(request):
    """Losses and gradients of batches of several lengths, plain and compiled, and the compiler's graphs after each."""
    objective = OBJECTIVES["forward_kl"]
    with open_world() as world:
        batches = [
            batch for seed in range(3) for batch in make_batches(uneven_trajectories(seed)[:8], objective, world)
        ]
        results = {}
        for compiled in (False, True):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            decoder = make_student("qwen3")
            model = DistillationModel(decoder, vocab_size=VOCAB_SIZE, logits_chunk_mb=1)
            training = replace(TRAINING, compile=compiled, **request.param)
            parallelize(model, decoder, world.mesh, training)
            results[compiled] = []
            for batch in batches:
                loss = model(batch, objective, num_tokens=10, current_version=0).loss
                loss.backward()
                gradients = {name: value.grad.to_local().clone() for name, value in decoder.named_parameters()}
                graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
                results[compiled].append((len(batch.input_ids), loss.item(), gradients, graphs))
                model.zero_grad()
    return results


def test_losses_and_gradients_are_those_of_plain_layers(found):
    for (_, loss, gradients, _), (_, expected, expected_gradients, _) in zip(found[True], found[False], strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected_gradients[name], atol=1e-5, rtol=1e-5)


def test_other_lengths_compile_nothing_anew(found):
    lengths, graphs = ([one[i] for one in found[True]] for i in (0, 3))
    assert len(set(lengths)) > 3
    assert 0 < graphs[0] == graphs[-1]
    assert found[False][-1][3] == 0


def compile_split() -> dict[bool, dict[str, torch.Tensor]]:
    """Gradients of plain and of compiled layers that two processes share."""
    objective, parallel = OBJECTIVES["forward_kl"], LAYOUTS[2]["tp, sequence"]
    gradients = {}
    with open_world(parallel) as world:
        batches = make_batches(uneven_trajectories(0)[:8], objective, world)
        for compiled in (False, True):
            model = make_model("qwen3", world.mesh, parallel, replace(TRAINING, compile=compiled))
            gradients[compiled] = first_gradients(model, objective, batches, world)
    return gradients


def test_gradients_of_split_layers_are_those_of_plain_ones(tmp_path):
    for gradients in run_world(compile_split, size=2, folder=tmp_path):
        for name, expected in gradients[False].items():
            torch.testing.assert_close(gradients[True][name], expected, atol=1e-5, rtol=1e-5)
            assert expected.abs().max() > 1e-4, name
