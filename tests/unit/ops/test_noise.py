"""The sampler's noise: a function of (seed, number, position, column), uniform and independent over each of them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_opd.ops.noise import race_uniforms, row_keys, uniforms

INT63 = st.integers(0, 2**63 - 1)


def splitmix64(state: int, word: int) -> int:
    """Output number `word` of SplitMix64 from `state`, in Python's unbounded integers."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15 * (word + 1)) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_reference_is_splitmix64():
    # First outputs of Vigna's splitmix64.c from seed 1234567, as its users publish them.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix64(1234567, i) for i in range(3)] == published


@settings(deadline=None)
@given(seed=st.integers(0, 2**70), number=INT63, position=INT63, num_columns=st.integers(1, 5))
def test_signed_arithmetic_equals_unsigned(seed, number, position, num_columns):
    drawn = uniforms(seed, torch.tensor([number]), torch.tensor([position]), num_columns)
    state = splitmix64(splitmix64(seed % 2**64, number), position)
    expected = [((splitmix64(state, column) >> 12) + 0.5) / 2**52 for column in range(num_columns)]
    assert drawn.tolist() == [expected]
    assert all(0 < value < 1 for value in expected)


def race_bits(key: int, draw: int, token: int) -> int:
    """The 52 bits of csrc/noise.h for one id, in Python's unbounded integers."""
    mask = 2**32 - 1
    draw_key = splitmix64(key, draw)
    word = token ^ (draw_key & mask)
    word = (word ^ (word >> 16)) * 0x7FEB352D & mask
    word = (word ^ (word >> 15)) + (draw_key >> 32) & mask
    word = word * 0x846CA68B & mask
    return (word ^ (word >> 16)) << 20 | splitmix64(draw_key, token) >> 44


@settings(deadline=None)
@given(seed=st.integers(0, 2**70), number=INT63, position=INT63, tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1))
def test_race_noise_is_what_its_definition_says(seed, number, position, tokens):
    keys = row_keys(seed, torch.tensor([number]), torch.tensor([position]))
    key = splitmix64(splitmix64(seed % 2**64, number), position)
    assert keys.item() % 2**64 == key
    expected = [[(race_bits(key, draw, token) + 0.5) / 2**52 for token in tokens] for draw in range(3)]
    assert race_uniforms(keys, 3, torch.tensor(tokens))[0].tolist() == expected


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**20)), min_size=1, max_size=20),
    num_columns=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_a_row_does_not_depend_on_the_others(rows, num_columns, seed):
    numbers, positions = torch.tensor(rows).unbind(1)
    together = uniforms(seed, numbers, positions, num_columns)
    for row, (number, position) in enumerate(rows):
        alone = uniforms(seed, torch.tensor([number]), torch.tensor([position]), num_columns + 1)
        assert torch.equal(together[row], alone[0, :num_columns])


def grid(seed: int, numbers: int = 64, positions: int = 64, columns: int = 64) -> torch.Tensor:
    """[numbers, positions, columns]: neighbours along each axis, as a run uses them."""
    number, position = torch.meshgrid(torch.arange(numbers), torch.arange(positions), indexing="ij")
    return uniforms(seed, number.flatten(), position.flatten(), columns).view(numbers, positions, columns)


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5])
def test_uniform(seed):
    values = grid(seed).flatten()
    observed = torch.histc(values, bins=256, min=0, max=1).double()
    expected = len(values) / 256
    chi_square = ((observed - expected) ** 2 / expected).sum()
    # 255 degrees of freedom: mean 255, standard deviation 22.6. Five deviations up have probability about 1e-5.
    assert chi_square < 255 + 5 * math.sqrt(2 * 255)


def test_independent_along_and_across_axes():
    values = grid(7) - 0.5
    error = 1 / math.sqrt(values.numel())  # standard deviation of a correlation of independent values
    for shift in itertools.product((0, 1), repeat=3):
        if any(shift):
            correlation = (values * values.roll(shift, dims=(0, 1, 2))).mean() * 12
            assert abs(correlation) < 5 * error, f"correlation of neighbours at {shift}: {correlation}"
    assert abs((values * (grid(8) - 0.5)).mean() * 12) < 5 * error
    # Swapped roles of number and position name different draws.
    assert abs((values * values.transpose(0, 1)).mean() * 12) < 5 * error + 1 / 64  # the diagonal is shared


def test_no_value_occurs_twice():
    values = grid(3).flatten()
    assert len(values.unique()) == len(values)
