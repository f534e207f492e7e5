"""What [parallel] can ask for, in one process: products of axes, divisible models, padding, what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.distributed.cases import OBJECTIVES, make_scorer
from tests.helpers.arithmetic import VOCAB_SIZE, make_decoder, save_model
from tests.helpers.trajectories import make_trajectories
from titan_opd.config.schema import OptimizerConfig, ParallelConfig, TrainingConfig
from titan_opd.data import pack
from titan_opd.data.packing import pad_tokens
from titan_opd.learner import DistillationModel
from titan_opd.parallel import load_shards, open_world, parallelize
from titan_opd.parallel.mesh import AXES, axis_sizes
from titan_opd.parallel.tensor_parallel import check_divisible

SIZES = st.integers(1, 12)


@given(SIZES, SIZES, SIZES)
def test_the_axes_multiply_to_the_processes(replicate, shard, tp):
    total = replicate * shard * tp
    for dp_shard in (shard, -1):
        config = ParallelConfig(dp_replicate=replicate, dp_shard=dp_shard, tp=tp)
        assert axis_sizes(config, total) == (replicate, shard, tp)


@given(SIZES, SIZES, SIZES, st.integers(1, 2000))
def test_another_product_is_refused_with_the_numbers(replicate, shard, tp, num_processes):
    if replicate * shard * tp == num_processes:
        return
    with pytest.raises(ValueError, match=rf"tp = {tp} need {replicate * shard * tp} processes.* {num_processes};"):
        axis_sizes(ParallelConfig(dp_replicate=replicate, dp_shard=shard, tp=tp), num_processes)


@pytest.mark.parametrize("num_processes", [1, 3, 5, 7])
def test_no_rest_for_dp_shard_is_refused(num_processes):
    with pytest.raises(ValueError, match=rf"a multiple of 4 processes, and there are {num_processes}; choose axes"):
        axis_sizes(ParallelConfig(dp_replicate=2, tp=2), num_processes)


def test_one_process_is_a_mesh_too():
    with open_world() as world:
        assert world.mesh.mesh_dim_names == AXES
        assert (world.dp_rank, world.dp_size, world.tp_rank, world.tp_size) == (0, 1, 0, 1)
        assert world.share([1, 2, 3]) == [1, 2, 3]
        assert world.gather_shares("a") == world.gather("a") == ["a"]
        assert world.agree("a") == "a"


@pytest.mark.parametrize(
    ("shape", "tp", "message"),
    [
        ({}, 4, r"tp = 4 .* num_key_value_heads = 2; possible: 1, 2"),
        ({}, 3, r"tp = 3 .* num_attention_heads = 4; possible: 1, 2"),
        ({"num_key_value_heads": 4, "intermediate_size": 50}, 4, r"tp = 4 .* intermediate_size = 50; possible: 1, 2"),
    ],
)
def test_a_model_that_tp_cannot_share_is_refused_with_the_numbers(shape, tp, message):
    with pytest.raises(ValueError, match=message):
        check_divisible(make_decoder("llama", seed=0, **shape).config, tp)


@pytest.mark.parametrize(
    ("stored", "shape", "message"),
    [
        ("qwen3", {"head_dim": 8}, r"q_norm.*"),  # names that the student does not have
        ("llama", {"num_hidden_layers": 1}, r"layers\.1.*"),  # names that are missing
        ("llama", {"intermediate_size": 40}, r"(gate|up|down)_proj.* 40"),
    ],
)
def test_a_checkpoint_of_another_architecture_is_refused_by_name_and_nothing_is_loaded(
    tmp_path, stored, shape, message
):
    save_model(tmp_path / "stored", stored, seed=1, **shape)
    decoder = make_decoder("llama", seed=0)
    model = DistillationModel(decoder, vocab_size=VOCAB_SIZE, logits_chunk_mb=1)
    with open_world() as world:
        parallelize(model, decoder, world.mesh, TrainingConfig(steps=1))
        with pytest.raises(ValueError, match=message):
            load_shards(decoder, tmp_path / "stored")
        for name, parameter in make_decoder("llama", seed=0).named_parameters():
            assert torch.equal(decoder.get_parameter(name).full_tensor(), parameter), name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ParallelConfig(sequence_parallel=True), "parallel.tp, which is 1"),
        (lambda: ParallelConfig(dp_shard=0), "dp_shard = 0"),
        (lambda: TrainingConfig(steps=1, compile=True, recompute_activations="selective"), "selective"),
        (lambda: OptimizerConfig(momentum=0.5), "momentum = 0.5 has no effect"),
        (lambda: OptimizerConfig(muon_dtype="float32"), "muon_dtype = 'float32' has no effect"),
    ],
)
def test_options_without_effect_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("multiple", [1, 2, 3, 8, 64])
def test_padded_tokens_change_nothing_but_the_number_of_tokens(multiple):
    objective = OBJECTIVES["forward_kl"]
    answers = make_trajectories(3, vocab_size=VOCAB_SIZE, seed=5)
    (batch,) = pack(make_scorer(objective).score(answers), 1000)
    padded = pad_tokens(batch, multiple)
    assert len(padded.input_ids) % multiple == 0
    assert 0 <= len(padded.input_ids) - len(batch.input_ids) < multiple
    lengths = padded.cu_seqlens.diff()
    assert lengths.min() > 0
    assert lengths.max() == padded.max_seqlen
    assert torch.equal(padded.positions, torch.cat([torch.arange(length) for length in lengths]))
    model = DistillationModel(make_decoder("llama", seed=0), vocab_size=VOCAB_SIZE, logits_chunk_mb=1)
    losses = [model(one, objective, num_tokens=7, current_version=0).loss for one in (batch, padded)]
    torch.testing.assert_close(*losses)
