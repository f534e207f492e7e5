"""What crosses the processes: predicted, and counted by operator in worlds of two. Bytes and calls are equal."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from check_plan import OBJECTIVE, Case, learner_of

from tests.helpers.communication import CountCommunication
from tests.helpers.worlds import run_world
from titan_opd.config.schema import ParallelConfig, TrainingConfig
from titan_opd.models import DecoderConfig
from titan_opd.parallel import begin_micro_batch
from titan_opd.parallel.mesh import axis_sizes
from titan_opd.planning.activations import Workload
from titan_opd.planning.communication import Traffic, step_traffic
from titan_opd.planning.parts import Grid

CASE = Case(
    shape={
        "model_type": "qwen3",
        "vocab_size": 23,  # 12 rows and 11
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    },
    lengths=(5, 9),
    training=TrainingConfig(steps=1, logits_chunk_mb=0.0002),  # several chunks
    num_microbatches=3,
    num_candidates=3,
    num_processes=2,
)


def case(*, recompute: str = "none", compute_dtype: str = "float32", **parallel: object) -> Case:
    training = replace(CASE.training, recompute_activations=recompute, compute_dtype=compute_dtype)
    return replace(CASE, training=training, parallel=ParallelConfig(**parallel))


CASES = {
    "fsdp": case(),
    "fsdp, reduced each time": case(reduce_gradients="each"),
    "fsdp, gathered": case(reshard_after_forward=False),
    "fsdp, narrow": case(compute_dtype="bfloat16"),
    "hsdp": case(dp_replicate=2),
    "tp": case(tp=2),
    "tp, full": case(tp=2, recompute="full"),
    "tp, sequence": case(tp=2, sequence_parallel=True),
    "tp, sequence, full": case(tp=2, sequence_parallel=True, recompute="full"),
}


def count(case: Case) -> dict[str, dict[str, int]]:
    """Of the forward and backward passes of a step."""
    with learner_of(case) as (learner, batches, _), CountCommunication() as counter:
        for number, batch in enumerate(batches, start=1):
            begin_micro_batch(learner.model, case.parallel, is_last=number == len(batches))
            learner.model(batch, OBJECTIVE, num_tokens=10, current_version=0).loss.backward()
    return {"calls": dict(counter.calls), "bytes": dict(counter.num_bytes)}


def count_all() -> dict[str, dict[str, dict[str, int]]]:
    return {name: count(one) for name, one in CASES.items()}


def traffic_of(case: Case) -> list[Traffic]:
    num_tokens = sum(case.lengths)
    replicate, shard, tp = axis_sizes(case.parallel, case.num_processes)
    return step_traffic(
        DecoderConfig.from_dict(case.shape),
        Workload(num_tokens, num_tokens, case.num_microbatches),
        Grid(replicate, shard, tp, case.parallel.sequence_parallel),
        training=case.training,
        parallel=case.parallel,
        optimizer=case.optimizer,
        numbers=case.num_candidates,
    )


@pytest.mark.slow
def test_calls_and_bytes_are_those_that_are_counted(tmp_path: Path):
    for counted in run_world(count_all, size=2, folder=tmp_path):
        for name, one in CASES.items():
            calls, num_bytes = Counter(), Counter()
            for traffic in traffic_of(one):
                calls[traffic.collective] += traffic.calls
                num_bytes[traffic.collective] += traffic.num_bytes
            assert calls == counted[name]["calls"], name
            assert num_bytes == counted[name]["bytes"], name


def test_a_lone_process_sends_nothing():
    assert traffic_of(replace(CASE, num_processes=1)) == []


@pytest.mark.parametrize(
    ("collective", "factor"), [("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_reduce", 1.5)]
)
def test_a_ring_of_four_sends_three_quarters_once_or_twice(collective, factor):
    assert Traffic("x", "tp", collective, 1, 1000, 4).wire_bytes == 1000 * factor
