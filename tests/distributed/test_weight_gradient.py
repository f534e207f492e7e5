"""With bfloat16 layers the output projection's gradient is summed over processes in float32, as their heads took it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.cases import OBJECTIVES, make_scorer
from tests.helpers.arithmetic import VOCAB_SIZE, make_decoder
from tests.helpers.trajectories import make_trajectories
from tests.helpers.worlds import run_world
from titan_opd.config.schema import TrainingConfig
from titan_opd.data import pack
from titan_opd.learner import DistillationModel
from titan_opd.losses import distillation
from titan_opd.losses.head import HeadOutput
from titan_opd.parallel import World, open_world, parallelize, whole_tensor

pytestmark = pytest.mark.slow  # two more processes import everything

STUDENTS = {"tied": "llama", "untied": "qwen3"}
ONE_ROW_MB = 24 * 2 / 2**20  # a chunk for each row, so that their float32 sum is no bfloat16 number


def sharded_gradients() -> dict[str, dict[str, Any]]:
    """What each process does."""
    with open_world() as world:
        return {name: sharded_gradient(family, world) for name, family in STUDENTS.items()}


def sharded_gradient(family: str, world: World) -> dict[str, Any]:
    """The projection's reduced gradient, and this process's part of it as its head computed it."""
    decoder = make_decoder(family, seed=0)
    model = DistillationModel(decoder, vocab_size=VOCAB_SIZE, logits_chunk_mb=ONE_ROW_MB)
    parallelize(model, decoder, world.mesh, TrainingConfig(steps=1, compute_dtype="bfloat16"))
    objective = OBJECTIVES["forward_kl"]
    answers = make_trajectories(2, vocab_size=VOCAB_SIZE, longest=8, seed=3)
    (batch,) = pack(make_scorer(objective).score(world.share(answers)), 100)

    heads: list[HeadOutput] = []
    run_head = distillation.run_head

    def recording_run_head(*arguments: Any, **options: Any) -> HeadOutput:
        heads.append(run_head(*arguments, **options))
        return heads[-1]

    distillation.run_head = recording_run_head
    output = model(batch, objective, num_tokens=10, current_version=0)
    distillation.run_head = run_head
    own = heads[0].grad_weight.clone()  # backward hands the original over
    output.loss.backward()
    return {
        "reduced": whole_tensor(decoder.lm_head_weight.grad),
        "own": own,
        "products": heads[0].grad_hidden.dtype,
        "read": batch.input_ids,
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_world(sharded_gradients, size=2, folder=tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("student", STUDENTS)
def test_the_reduced_gradient_is_the_float32_sum(results, student):
    first, second = (result[student] for result in results)
    assert first["products"] == torch.bfloat16, "the head's products should be those of the layers' precision"
    expected = first["own"] + second["own"]
    # Where the embedding is the projection, tokens that were read have a second gradient.
    compared = torch.ones(len(expected), dtype=torch.bool)
    if student == "tied":
        compared[torch.cat([first["read"], second["read"]])] = False
    assert compared[:VOCAB_SIZE].sum() > 2
    for result in (first, second):
        assert result["reduced"].dtype == torch.float32
        assert torch.equal(result["reduced"][compared], expected[compared])
    for rounded in (
        expected.bfloat16().float(),
        first["own"].bfloat16().float() + second["own"].bfloat16().float(),
    ):
        assert not torch.equal(rounded[compared], expected[compared]), "a rounded sum would pass unnoticed"


def test_a_tied_projection_has_the_embedding_s_gradient_too(results):
    first, second = (result["tied"] for result in results)
    beyond = first["reduced"] - (first["own"] + second["own"])
    read = torch.cat([first["read"], second["read"]]).unique()
    assert beyond[read].abs().amax(1).min() > 1e-6
