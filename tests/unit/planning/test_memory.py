"""The peak of a step's memory: predicted, and counted by PyTorch's allocator. scripts/check_plan.py does it at size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from check_plan import Case, measure_allocations, predict

from tests.helpers.worlds import run_world
from titan_opd.config.schema import OptimizerConfig, ParallelConfig, TrainingConfig
from titan_opd.models import DecoderConfig
from titan_opd.planning.activations import Workload
from titan_opd.planning.memory import StepMemory, TeacherShape
from titan_opd.planning.parts import Grid

TRAINING = TrainingConfig(steps=1)
CASE = Case(
    shape={
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    },
    lengths=(64, 60, 68, 64),
    training=TRAINING,
    num_candidates=4,
)
SMALL_CHUNKS = 0.1  # MiB: the peak is a layer's, not the loss head's
UNTIED = CASE.shape | {"tie_word_embeddings": False}
QWEN3 = UNTIED | {"model_type": "qwen3", "head_dim": 32}

ALONE = {
    "the loss head": CASE,
    "a layer": replace(CASE, training=replace(TRAINING, logits_chunk_mb=SMALL_CHUNKS)),
    "an untied vocabulary": replace(CASE, shape=UNTIED),
    "norms of heads": replace(CASE, shape=QWEN3, training=replace(TRAINING, logits_chunk_mb=SMALL_CHUNKS)),
    "full": replace(CASE, training=replace(TRAINING, recompute_activations="full", logits_chunk_mb=SMALL_CHUNKS)),
    "selective": replace(
        CASE, training=replace(TRAINING, recompute_activations="selective", logits_chunk_mb=SMALL_CHUNKS)
    ),
    "bfloat16": replace(CASE, training=replace(TRAINING, compute_dtype="bfloat16", logits_chunk_mb=SMALL_CHUNKS)),
    "two micro-batches": replace(CASE, num_microbatches=2),
    "muon": replace(CASE, optimizer=OptimizerConfig(name="muon")),
}
TOGETHER = {
    "fsdp": replace(CASE, num_processes=2),
    "full": replace(CASE, num_processes=2, training=replace(TRAINING, recompute_activations="full")),
    "two micro-batches": replace(CASE, num_processes=2, num_microbatches=2),
    "tp": replace(CASE, num_processes=2, parallel=ParallelConfig(tp=2)),
    "tp, sequence": replace(CASE, num_processes=2, parallel=ParallelConfig(tp=2, sequence_parallel=True)),
}


@pytest.mark.parametrize("name", ALONE)
def test_the_peak_of_one_process_is_predicted(name):
    counted = measure_allocations(ALONE[name])
    assert predict(ALONE[name]) == pytest.approx(counted, rel=0.05)


def measure_all() -> dict[str, int]:
    return {name: measure_allocations(case) for name, case in TOGETHER.items()}


@pytest.mark.slow
def test_the_peaks_of_two_processes_are_predicted(tmp_path: Path):
    # Gloo's threads let go of a collective's tensors when they get to it: now and then a layer's gradients stay longer.
    for counted in run_world(measure_all, size=2, folder=tmp_path):
        for name, case in TOGETHER.items():
            assert predict(case) == pytest.approx(counted[name], rel=0.15), name


def step_memory(grid: Grid = Grid(), **changes: object) -> StepMemory:  # noqa: B008 (frozen)
    options = {"training": TRAINING, "parallel": ParallelConfig(), "optimizer": OptimizerConfig()} | changes
    return StepMemory(DecoderConfig.from_dict(CASE.shape), Workload(256, 200), grid, **options)


def test_shards_divide_parameters_and_moments():
    alone, shard = step_memory(), step_memory(Grid(shard=8))
    assert alone.parameters == 8 * shard.parameters
    assert alone.optimizer_state == 2 * alone.parameters == 8 * shard.optimizer_state


def test_narrow_moments_and_muon_take_less():
    adamw, narrow, muon = (
        step_memory(optimizer=OptimizerConfig(name=name)).optimizer_state for name in ("adamw", "adamw_8bit", "muon")
    )
    assert narrow < muon < adamw
    assert narrow == pytest.approx(adamw * (1 + 4 / 256) / 4, rel=0.02)


def test_a_dense_teacher_has_its_share_of_a_chunk():
    teacher = TeacherShape(vocab_size=1024, itemsize=4)
    training = replace(TRAINING, logits_chunk_mb=0.5)
    sparse, dense = step_memory(training=training), step_memory(training=training, dense_teacher=teacher)
    # Chunks are cut evenly, so both take at most the limit, and dense ones have half as many rows.
    assert abs(sparse.head - dense.head) < 0.1 * 2**20


def test_parameters_that_stay_gathered_are_counted():
    grid = Grid(shard=8)
    freed = step_memory(grid).peak.total
    kept = step_memory(grid, parallel=ParallelConfig(reshard_after_forward=False)).peak.total
    layers = 4 * sum(group.gathered for group in step_memory(grid).parts.layers)
    assert 0 < kept - freed <= layers
