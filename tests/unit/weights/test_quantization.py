"""The quantiser against its definition in float64, what it does with odd numbers, and who is quantised."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.engines.writing import make_decoder
from titan_opd.weights.pieces import WeightSpec
from titan_opd.weights.quantization import (
    LARGEST,
    TYPES,
    Dequantizer,
    dequantize_rows,
    describe_quantization,
    is_quantized,
    is_scale,
    quantize_rows,
    quantized_specs,
    scale_name,
)

SMALLEST = float(torch.finfo(torch.float32).tiny)
INT8, FP8 = TYPES["int8"], TYPES["fp8"]
GRIDS = {
    INT8: torch.arange(-127, 128).double(),
    FP8: torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8).view(FP8).double(),
}
HALF = 2.0**-1
per_type = pytest.mark.parametrize("dtype", [INT8, FP8], ids=list(TYPES))


def nearest(value: float, grid: torch.Tensor) -> float:
    """The number of the grid next to a value; of two as near, the one with the even last bit."""
    distances = (grid - value).abs()
    near = grid[distances == distances.min()].unique()
    if len(near) == 1:
        return float(near)
    if torch.equal(grid, GRIDS[INT8]):
        return float(near[near % 2 == 0])
    return float(near[(near.to(FP8).view(torch.uint8) & 1) == 0])


def reference(weight: torch.Tensor, dtype: torch.dtype) -> tuple[list[list[float]], list[float]]:
    """The definition: float64, rounded to float32 where it says so. A float64 quotient of float32 numbers rounds to the
    same float32 number as the exact one (53 bits are more than 2 x 24 + 2)."""
    rows, scales = [], []
    for row in weight.double():
        scale = max(float(numpy.float32(float(row.abs().max()) / LARGEST[dtype])), SMALLEST)
        values = [float(numpy.float32(float(value) / scale)) for value in row]
        rows.append([nearest(min(max(v, -LARGEST[dtype]), LARGEST[dtype]), GRIDS[dtype]) for v in values])
        scales.append(scale)
    return rows, scales


# A row's largest number of 127 or 448 makes its scale 1: what else is in it is rounded as it is.
ODD = [
    [[0.0, -0.0, 0.0, 0.0]],
    [[127.0, 0.5, 1.5, -2.5], [448.0, 17.0, 19.0, 2.0**-10]],
    [[3e38, 1.0, -1e-30, 0.0]],
    [[1e-40, -1e-45, 0.0, 1e-41]],
    [[-448.0, 3 * 2.0**-10, -(2.0**-10), 464.0]],
]


@per_type
@settings(max_examples=80, deadline=None)
@given(
    rows=arrays.arrays(
        numpy.float32, (3, 4), elements=st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
    )
)
@example(rows=numpy.float32(ODD[0]))
@example(rows=numpy.float32(ODD[1]))
@example(rows=numpy.float32(ODD[2]))
@example(rows=numpy.float32(ODD[3]))
@example(rows=numpy.float32(ODD[4]))
def test_rows_are_those_of_the_definition(dtype, rows):
    weight = torch.from_numpy(rows.copy())
    quantized, scale = quantize_rows(weight, dtype)
    expected, scales = reference(weight, dtype)
    assert scale.tolist() == scales
    assert quantized.double().tolist() == expected


@per_type
def test_many_rows_are_quantised_as_each_by_itself(dtype, monkeypatch):
    """In parts of any size, from bfloat16 too, and with rows beside them."""
    weight = (torch.randn(37, 24, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    quantized, scale = quantize_rows(weight, dtype)
    for index, row in enumerate(weight):
        alone, its_scale = quantize_rows(row[None].float(), dtype)
        assert torch.equal(alone[0].view(torch.int8), quantized[index].view(torch.int8))
        assert float(its_scale) == float(scale[index])
    monkeypatch.setattr("titan_opd.weights.quantization._CHUNK_ELEMENTS", 100)
    again, its_scales = quantize_rows(weight.t().contiguous().t(), dtype)
    assert torch.equal(again.view(torch.int8), quantized.view(torch.int8))
    assert torch.equal(its_scales, scale)
    assert again.is_contiguous()


@per_type
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so(dtype, bad):
    weight = torch.ones(2, 3)
    weight[0, 1] = bad
    values = dequantize_rows(*quantize_rows(weight, dtype), torch.float32)
    assert not values[0].isfinite().any()
    torch.testing.assert_close(values[1], weight[1])


@per_type
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16])
def test_every_number_stands_for_itself_times_the_scale(dtype, to):
    grid = GRIDS[dtype].to(dtype)[None]
    scale = torch.tensor([0.0123])
    expected = (GRIDS[dtype].float() * scale).to(to)
    assert torch.equal(dequantize_rows(grid, scale, to)[0], expected)


@per_type
def test_how_far_a_row_moves(dtype):
    """Half a step of the grid: of 1 / 127 of the largest, or of 2^-3 of the number itself."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    quantized, scale = quantize_rows(weight, dtype)
    moved = (dequantize_rows(quantized, scale, torch.float32) - weight).abs()
    step = scale[:, None] if dtype == INT8 else (weight.abs() * 2**-3).clamp(min=scale[:, None] * 2**-9)
    assert bool((moved <= HALF * step * (1 + 1e-5)).all())
    assert bool((moved.amax(1) > 0.1 * scale).all())


# ---- Who is quantised ------------------------------------------------------------------------------------------------


def specs_of(**shape):
    parameters = make_decoder(**shape).named_parameters()
    return {name: WeightSpec(tuple(value.shape), value.dtype) for name, value in parameters}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_linear_layers_of_the_blocks_and_nothing_else(tied):
    specs = specs_of(model_type="qwen2", tie_word_embeddings=tied)
    matrices = {name for name, spec in specs.items() if len(spec.shape) == 2}
    quantized = {name for name in specs if is_quantized(name)}
    assert matrices - quantized == {"model.embed_tokens.weight", *(() if tied else ("lm_head.weight",))}
    assert quantized < matrices
    assert quantized_specs(specs, "none") == specs
    found = quantized_specs(specs, "fp8")
    assert [name for name in found if not is_scale(name)] == list(specs)
    for name, spec in specs.items():
        assert found[name] == (WeightSpec(spec.shape, FP8) if name in quantized else spec)
        assert found.get(scale_name(name)) == (WeightSpec(spec.shape[:1], torch.float32) if name in quantized else None)


def test_the_audit_line_counts_what_is_stored():
    specs = specs_of(model_type="qwen2")
    assert describe_quantization(specs, torch.float32) == []
    (line,) = describe_quantization(quantized_specs(specs, "int8"), torch.float32)
    # 2 layers of 4 + 3 matrices: q and o 32 x 32, k and v 16 x 32, three of 48 x 32; 192 + 96 + 32 rows have a scale.
    elements = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)
    rows = 2 * (32 + 16 + 16 + 32 + 48 + 48 + 32)
    assert line == (
        "quantised weights (int8, a scale for each output row; products in float32): 14 linear layers, "
        "self_attn.q_proj, self_attn.k_proj, self_attn.v_proj, self_attn.o_proj, mlp.gate_proj, mlp.up_proj, "
        f"mlp.down_proj: {(elements + 4 * rows) / 1e6:.1f} MB instead of {4 * elements / 1e6:.1f} MB; "
        "not model.embed_tokens, lm_head (token by token), 11 norms and biases (small)"
    )


def test_the_two_halves_of_a_weight_may_come_apart():
    name = "model.layers.0.mlp.up_proj.weight"
    weight, norm = torch.randn(4, 6), torch.randn(6)
    quantized, scale = quantize_rows(weight, INT8)
    halves = Dequantizer(torch.float32)
    (only,) = halves.values([(scale_name(name), scale), ("model.norm.weight", norm)])
    assert only == ("model.norm.weight", norm)
    ((found, values),) = halves.values([(name, quantized)])
    assert found == name
    assert torch.equal(values, dequantize_rows(quantized, scale, torch.float32))
