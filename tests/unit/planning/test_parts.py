"""The parts of each parameter, against what the run's own parallelisation leaves in a fake world."""

from __future__ import annotations

import math

import pytest

from tests.helpers.arithmetic import make_decoder
from titan_opd.planning.parts import Grid, divide


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_one_process_holds_everything(family):
    config = make_decoder(family, seed=0).config
    parts = divide(config, Grid())
    shapes = {name: tuple(p.shape) for name, p in make_decoder(family, seed=0).named_parameters()}
    assert {part.name: part.shard_shape for part in parts.all} == shapes
    assert len(parts.layers) == config.num_layers


@pytest.mark.parametrize("shard", [2, 3, 5, 64])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_shards_of_all_processes_are_the_parameter(shard, tp):
    config = make_decoder("qwen3", seed=0).config  # heads of 12 and a vocabulary of 24 leave uneven shards
    held: dict[str, int] = {}
    for shard_rank in range(shard):
        for tp_rank in range(tp):
            for part in divide(config, Grid(shard=shard, tp=tp, shard_rank=shard_rank, tp_rank=tp_rank)).all:
                held[part.name] = held.get(part.name, 0) + part.held
                assert part.held <= part.padded
    for part in divide(config, Grid(shard=shard, tp=tp)).all:
        copies = tp if part.tp_shape == part.shape else 1  # norms are whole on every rank of tp
        assert held[part.name] == copies * math.prod(part.shape), part.name


def test_groups_gather_what_tp_leaves():
    config = make_decoder("llama", seed=0).config
    whole, half = divide(config, Grid()), divide(config, Grid(shard=4, tp=2))
    norms = sum(part.gathered for part in whole.all if len(part.shape) == 1)
    total = sum(group.gathered for group in whole.groups)
    assert 2 * (sum(group.gathered for group in half.groups) - norms) == total - norms
    assert half.layers[-1].parts[-1].name == "model.norm.weight"


def test_tp_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"parallel.tp = 3 .* possible: 1, 2"):
        divide(make_decoder("llama", seed=0).config, Grid(tp=3))
