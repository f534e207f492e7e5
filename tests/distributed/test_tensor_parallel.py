"""The decoder and the loss head split over two processes by PyTorch's public plan train as one process does.

The attention heads, the feed-forward units and the vocabulary are split; norms are whole on both processes, whose
gradients are equal because what flows back into them is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.distributed.cases import OBJECTIVES, make_scorer
from tests.helpers.arithmetic import VOCAB_SIZE, make_decoder
from tests.helpers.trajectories import make_trajectories
from tests.helpers.worlds import run_world
from titan_opd.config.schema import OptimizerConfig
from titan_opd.data import PackedBatch, pack
from titan_opd.losses import Objective, distillation_loss
from titan_opd.models import Decoder, PackedAttention
from titan_opd.optimizer import build_optimizer
from titan_opd.parallel import whole_tensor

pytestmark = pytest.mark.slow  # two more processes import everything

NUM_STEPS = 5
VOCAB_ROWS = 23  # 12 and 11; the second process has tokens of the task and padding
TIED = {"tied": True, "untied": False}
# With a small eps AdamW's first steps make a step of full size out of the rounding of a gradient of 0.
OPTIMIZER = OptimizerConfig(learning_rate=3e-3, eps=1e-3, weight_decay=0.1)
PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}


def train_all() -> dict[tuple[str, str], dict[str, Any]]:
    """Every case, in the processes that there are."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    return {(kind, name): train(OBJECTIVES[kind], TIED[name], mesh) for kind in KINDS for name in TIED}


KINDS = ("forward_kl", "policy_gradient", "cross_entropy")


def train(objective: Objective, tied: bool, mesh: DeviceMesh | None) -> dict[str, Any]:
    """Losses of all steps, whole gradients of the first, whole weights after the last."""
    decoder = make_decoder("llama", seed=0, vocab_size=VOCAB_ROWS, tie_word_embeddings=tied)
    if mesh is not None:
        parallelize_module(decoder, mesh, PLAN if tied else PLAN | {"lm_head": ColwiseParallel()})
        assert decoder.model.layers[0].mlp.down_proj.weight.to_local().shape[1] == 48 // mesh.size()
        assert len(decoder.lm_head_weight.to_local()) in (12, 11)
    optimizer = build_optimizer(decoder.parameters(), OPTIMIZER)
    losses: list[float] = []
    for step in range(NUM_STEPS):
        answers = make_trajectories(6, vocab_size=VOCAB_SIZE, num_samples=3, top_k=5, seed=step)
        (batch,) = pack(make_scorer(objective).score(answers), 1000)
        loss = loss_of(decoder, batch, objective, None if mesh is None else mesh.get_group())
        loss.backward()
        if step == 0:
            gradients = {name: whole_tensor(value.grad) for name, value in decoder.named_parameters()}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    weights = {name: whole_tensor(value) for name, value in decoder.named_parameters()}
    return {"losses": losses, "gradients": gradients, "weights": weights}


def loss_of(decoder: Decoder, batch: PackedBatch, objective: Objective, tp_group: dist.ProcessGroup | None) -> Tensor:
    attention = PackedAttention(batch.cu_seqlens, batch.max_seqlen)
    hidden_NH = decoder(batch.input_ids, batch.positions, attention)[batch.loss_positions]
    weight_VH = decoder.lm_head_weight
    return distillation_loss(
        hidden_NH,
        weight_VH.to_local() if isinstance(weight_VH, DTensor) else weight_VH,
        objective,
        batch.scores,
        batch.token_weights,
        vocab_size=VOCAB_SIZE,
        tp_group=tp_group,
        logits_chunk_mb=0.001,
    ).loss


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """In one process, and in each of two."""
    return train_all(), *run_world(train_all, size=2, folder=tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_as_one(results, kind, tied):
    lone, *pair = (result[kind, tied] for result in results)
    assert max(lone["losses"]) - min(lone["losses"]) > 0.01
    for one in pair:
        assert one["losses"] == pytest.approx(lone["losses"], abs=1e-5)
        for what in ("gradients", "weights"):
            assert one[what].keys() == lone[what].keys()
            for name, value in lone[what].items():
                torch.testing.assert_close(
                    one[what][name], value, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
                )
    for name, gradient in lone["gradients"].items():
        assert gradient.abs().max() > 1e-4, name
