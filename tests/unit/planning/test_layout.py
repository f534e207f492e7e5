"""Layouts of many processes tried in one: shapes, placements, and what the run would refuse."""

from __future__ import annotations

import math

import pytest
import torch.distributed as dist

from tests.helpers.arithmetic import save_model
from titan_opd.config.load import load_config
from titan_opd.models import DecoderConfig
from titan_opd.planning.layout import try_layout

SHAPE = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.fixture(scope="module")
def toml(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    student = save_model(folder / "student", "qwen3", seed=0, **SHAPE)
    teacher = save_model(folder / "teacher", "llama", seed=1)
    file = folder / "run.toml"
    file.write_text(
        f"""
        [student]
        path = "{student}"
        [teacher]
        path = "{teacher}"
        top_k = 8
        [data]
        task = "arithmetic"
        max_prompt_tokens = 16
        [schedule]
        batch = 256
        [objective]
        kind = "forward_kl"
        [training]
        steps = 1
        [rollout.sampling]
        max_new_tokens = 64
        """
    )
    return file


def layout(toml, num_processes, *overrides):
    config = load_config(toml, overrides)
    return try_layout(config, DecoderConfig.from_directory(config.student.path), num_processes)


@pytest.mark.parametrize("num_processes", [1, 64, 256])
def test_fsdp_of_many_processes(toml, num_processes):
    first, last = layout(toml, num_processes)
    assert (first.rank, last.rank) == (0, num_processes - 1)
    embedding = next(shard for shard in first.shards if shard.name == "model.embed_tokens.weight")
    assert embedding.placements == "dp_shard: S(0)"
    assert embedding.local_shape == (-(-24 // num_processes), 96)
    if num_processes == 256:  # more processes than rows: the last has nothing
        assert last.num_elements == 0
    assert not dist.is_initialized()


def test_copies_shards_and_tensor_parallelism_together(toml):
    first, _ = layout(
        toml, 64, "--parallel.dp_replicate", "2", "--parallel.tp", "8", "--parallel.sequence_parallel", "true"
    )
    assert (first.grid.replicate, first.grid.shard, first.grid.tp) == (2, 4, 8)
    shards = {shard.name: shard for shard in first.shards}
    down = shards["model.layers.0.mlp.down_proj.weight"]  # [96, 192]: columns over tp, rows over FSDP
    assert down.local_shape == (96 // 4, 192 // 8)
    assert down.placements == "dp_replicate: R, dp_shard: S(0), tp: S(1)"
    up = shards["model.layers.0.mlp.up_proj.weight"]  # [192, 96]: rows over both
    assert up.local_shape == (192 // 8 // 4, 96)
    assert math.prod(up.local_shape) * 32 == math.prod(up.shape)


@pytest.mark.parametrize(
    ("num_processes", "overrides", "message"),
    [
        (63, ("--parallel.tp", "8"), "need a multiple of 8 processes, and there are 63"),
        (64, ("--parallel.dp_shard", "4"), "need 4 processes, and there are 64"),
        (64, ("--parallel.tp", "16"), "parallel.tp = 16 does not divide the student's num_attention_heads = 8"),
        (64, ("--schedule.batch", "32"), "32 answers a step cannot be shared equally by 64 processes"),
    ],
)
def test_what_the_run_would_refuse_is_refused(toml, num_processes, overrides, message):
    with pytest.raises(ValueError, match=message):
        layout(toml, num_processes, *overrides)
    assert not dist.is_initialized()
