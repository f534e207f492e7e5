"""What ranks exchange about a split vocabulary: top k and draws of the shards are those of the whole."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.worlds import run_world
from titan_opd.losses.vocab_parallel import VocabShard, merge_topk, merge_winners
from titan_opd.ops import RaceWinners, TopK, gumbel_sample, topk_logprobs


def stacked(shards):
    """The shards' fields as ranks gather them, [G, ...]."""
    return type(shards[0])(*(torch.stack(fields) for fields in zip(*shards, strict=True)))


def assert_same_topk(merged: TopK, whole: TopK):
    assert torch.equal(merged.ids, whole.ids)
    for name in ("values", "max", "tail_max"):
        torch.testing.assert_close(getattr(merged, name), getattr(whole, name), rtol=0, atol=0, equal_nan=True)
    for name in ("sum_exp", "tail_sum_exp"):
        torch.testing.assert_close(getattr(merged, name), getattr(whole, name), rtol=2e-6, atol=0, equal_nan=True)


def hard_rows(num_columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random, of few values, equal, peaked, -inf alone, and with -inf, +inf and NaN."""
    rows = torch.randn(8, num_columns, dtype=dtype)
    rows[1] = rows[1].round()
    rows[2] = 0.5
    rows[3, num_columns // 2] = 40
    rows[4] = -math.inf
    rows[5, ::2] = -math.inf
    rows[6, ::3] = math.inf
    rows[7, ::4] = math.nan
    return rows


@given(
    num_shards=st.sampled_from([1, 2, 4]),
    num_columns=st.integers(1, 60),
    k=st.integers(1, 20),
    padding=st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_topk_of_shards_is_that_of_the_whole(num_shards, num_columns, k, padding, dtype, seed):
    torch.manual_seed(seed)
    logits = torch.nn.functional.pad(hard_rows(num_columns, dtype), (0, padding), value=math.nan)
    shards, start = [], 0
    for shard in logits.tensor_split(num_shards, dim=1):  # with few columns some shards are empty
        shards.append(topk_logprobs(shard, k, vocab_start=start, vocab_size=num_columns))
        start += shard.shape[1]
    assert_same_topk(merge_topk(stacked(shards)), topk_logprobs(logits, k, vocab_size=num_columns))


@pytest.mark.parametrize("tail_mass", [1e-2, 1e-6])
def test_what_a_shard_loses_to_the_others_is_in_the_tail_to_full_precision(tail_mass):
    logits = torch.randn(4, 3000)
    logits[:, :16] += 20 - math.log(tail_mass)  # one shard has all that the whole keeps
    shards = [topk_logprobs(s, 16, vocab_start=i * 750) for i, s in enumerate(logits.chunk(4, dim=1))]
    merged, exact = merge_topk(stacked(shards)), topk_logprobs(logits.double(), 16)
    torch.testing.assert_close(merged.tail_logprob.double(), exact.tail_logprob, rtol=2e-7, atol=4e-6)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
def test_winners_of_shards_are_those_of_the_whole(num_shards):
    logits = hard_rows(50)
    keys = torch.arange(8)
    whole = gumbel_sample(logits, keys, 5)
    shards, start = [], 0
    for shard in logits.tensor_split(num_shards, dim=1):
        shards.append(gumbel_sample(shard, keys, 5, vocab_start=start))
        start += shard.shape[1]
    merged = merge_winners(stacked(shards))
    for name, a, b in zip(RaceWinners._fields, merged, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=name)
    assert whole.ids[4].tolist() == whole.ids[6].tolist() == whole.ids[7].tolist() == [-1] * 5


def check_on_ranks():
    """What each process does: 43 tokens in 44 rows of a projection, split among four ranks, two, and one."""
    torch.manual_seed(0)
    logits = torch.cat([hard_rows(43), torch.full((8, 1), 9.0)], dim=1)
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([one]) for one in range(4)]
    # One rank has none, and the last of four a token and the padding.
    check_columns(logits, [slice(0, 20), slice(20, 20), slice(20, 42), slice(42, 44)][rank], dist.group.WORLD)
    check_columns(logits, [slice(0, 22), slice(22, 44)][rank % 2], pairs[rank // 2])
    check_columns(logits, slice(0, 44), alone[rank])


def check_columns(logits, columns, group):
    """Ids, logits and draws of a rank with these columns are those of the whole, to the bit."""
    keys = torch.arange(8)
    shard = VocabShard.create(torch.zeros(columns.stop - columns.start, 1), torch.float32, 43, group)
    for k in (1, 7, 50):
        assert_same_topk(shard.topk(logits[:, columns], k), topk_logprobs(logits, k, vocab_size=43))
    drawn, whole = shard.sample(logits[:, columns], keys, 3), gumbel_sample(logits, keys, 3, vocab_size=43)
    for name, a, b in zip(RaceWinners._fields, drawn, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.slow
def test_on_4_2_and_1_processes(tmp_path):
    run_world(check_on_ranks, size=4, folder=tmp_path)
