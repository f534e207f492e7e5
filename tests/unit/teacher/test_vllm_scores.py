"""Ids looked up among those that an engine returned, and the mass that is left, against the definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_opd.teacher.vllm import find_ids, log_rest

VOCAB_SIZE = 23


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 8), st.integers(0, VOCAB_SIZE))
def test_ids_are_found_by_id_in_whatever_order(seed: int, num_rows: int, num_wanted: int, num_more: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs_NV = torch.randn(num_rows, VOCAB_SIZE, generator=generator).log_softmax(dim=-1)
    wanted_NK = torch.randint(VOCAB_SIZE, (num_rows, num_wanted), generator=generator)
    more_NF = torch.rand(num_rows, VOCAB_SIZE, generator=generator).argsort(dim=1)[:, :num_more]
    returned_NF = torch.cat([wanted_NK, more_NF], dim=1)
    order_NF = torch.rand(returned_NF.shape, generator=generator).argsort(dim=1)
    returned_NF = returned_NF.gather(1, order_NF)
    found_NK = find_ids(wanted_NK, returned_NF, logprobs_NV.gather(1, returned_NF), where="here")
    assert torch.equal(found_NK, logprobs_NV.gather(1, wanted_NK))


@pytest.mark.parametrize("missing", [0, 7, VOCAB_SIZE - 1])
def test_an_id_that_is_missing_is_named_with_its_place(missing: int) -> None:
    returned_NF = torch.tensor(
        [[id for id in range(VOCAB_SIZE) if id != missing or row == 0] + [3] * (row > 0) for row in range(3)]
    )
    wanted_NK = torch.tensor([[missing, 3], [3, 4], [4, missing]])
    with pytest.raises(ValueError, match=rf"sample 12: .* token {missing} at response token 2 \(1 are missing\)"):
        find_ids(wanted_NK, returned_NF, torch.zeros(returned_NF.shape), where="sample 12")


@given(st.integers(0, 2**31), st.integers(1, VOCAB_SIZE - 1))
def test_the_rest_is_the_mass_outside(seed: int, num_ids: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs_NV = torch.randn(5, VOCAB_SIZE, generator=generator, dtype=torch.float64).log_softmax(dim=-1)
    ids_NK = torch.rand(5, VOCAB_SIZE, generator=generator).argsort(dim=1)[:, :num_ids]
    outside_NV = logprobs_NV.scatter(1, ids_NK, -math.inf)
    again_NK = torch.cat([ids_NK, ids_NK[:, :1]], dim=1)
    for asked_NK in (ids_NK, again_NK):
        rest_N = log_rest(asked_NK, logprobs_NV.gather(1, asked_NK).float(), VOCAB_SIZE)
        torch.testing.assert_close(rest_N.double(), outside_NV.logsumexp(dim=1), atol=1e-4, rtol=0)


def test_nothing_is_left_of_a_whole_vocabulary_or_a_point_mass() -> None:
    ids_NK = torch.arange(4).repeat(2, 1)
    assert log_rest(ids_NK, torch.full((2, 4), math.log(0.25)), 4).tolist() == [-math.inf] * 2
    assert log_rest(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1), VOCAB_SIZE).tolist() == [-math.inf]
    above_one = torch.full((1, 2), math.log(0.5) + 1e-6)
    assert log_rest(torch.arange(2)[None], above_one, VOCAB_SIZE).tolist() == [-math.inf]
