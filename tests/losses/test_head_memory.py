"""How much memory the loss head takes beyond its inputs, counted allocation by allocation.

Shape suffixes: N rows, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.losses.scenes import Scene, build_scene
from titan_opd.losses import Objective

N, V, H = 1024, 16384, 64
CHUNKS = 8
OBJECTIVES = {
    "divergence": Objective("forward_kl"),
    "samples": Objective("policy_gradient", correction="ppo_clip"),
    "labels": Objective("cross_entropy"),
}


def peak_allocation(function: Callable[[], object]) -> int:
    """The most bytes that PyTorch's allocator holds at a time of what `function` asks for."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        function()
    events = [event for event in recording.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_allocations_are_counted():
    def function():
        first = torch.ones(1 << 20)
        del first
        second = torch.ones(1 << 18)
        return second + 1

    assert 4 << 20 <= peak_allocation(function) < (4 << 20) + 1000


@pytest.fixture(scope="module", params=OBJECTIVES)
def scene(request) -> Scene:
    return build_scene(OBJECTIVES[request.param], num_rows=N, vocab=V, hidden_size=H, scale=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_float32_weight_gradient_and_two_chunks_of_logits(scene, dtype):
    """One chunk is held; a second one, or a matrix of tokens by vocabulary, would not fit beside it."""
    narrow = scene.to(dtype)
    hidden, weight = narrow.hidden.requires_grad_(), narrow.weight.requires_grad_()
    chunk_bytes = N // CHUNKS * V * dtype.itemsize
    weight_bytes = V * H * 4

    def head():
        output = narrow.loss(hidden, weight, logits_chunk_mb=chunk_bytes / 2**20)
        torch.autograd.grad(output.loss, (hidden, weight))

    assert chunk_bytes + weight_bytes <= peak_allocation(head) <= 2 * chunk_bytes + weight_bytes
