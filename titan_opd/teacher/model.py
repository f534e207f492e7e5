"""The teacher's decoder with its scoring on top: whole in this process, or spread over the trainer's processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from titan_opd.config.schema import ParallelConfig, TrainingConfig
from titan_opd.data.packing import pad_tokens
from titan_opd.data.records import PackedBatch
from titan_opd.losses.vocab_parallel import VocabShard
from titan_opd.models import Decoder, DecoderConfig, PackedAttention
from titan_opd.parallel import World, load_shards, materialize, own_rows, parallelize
from titan_opd.parallel.tensor_parallel import check_divisible

T = TypeVar("T")


class TeacherModel(nn.Module):
    """Packed tokens in, what is read from their hidden states out.

    Its forward pass is the only way into a decoder that FSDP has spread: it gathers the vocabulary's matrices.

    Args:
        decoder: the teacher.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder.eval().requires_grad_(False)

    def forward(self, batch: PackedBatch, vocab_size: int, read: Callable[[Tensor, VocabShard], T]) -> T:
        """What `read` makes of the response tokens' hidden states [N, H] and this rank's output projection.

        Args:
            batch: packed trajectories.
            vocab_size: tokens of the tokenizer.
            read: called with the hidden states that predict the response tokens.
        """
        weight_VH, tp_group = own_rows(self.decoder.lm_head_weight)
        if tp_group is not None:  # sequence parallelism divides the tokens
            batch = pad_tokens(batch, tp_group.size())
        attention = PackedAttention(batch.cu_seqlens, batch.max_seqlen)
        hidden_NH = self.decoder(batch.input_ids, batch.positions, attention)[batch.loss_positions]
        return read(hidden_NH, VocabShard.create(weight_VH, hidden_NH.dtype, vocab_size, tp_group))


def load_sharded_teacher(path: Path, *, dtype: torch.dtype, parallel: ParallelConfig, world: World) -> TeacherModel:
    """A teacher spread over the trainer's processes as the student is; each reads its own shards.

    Args:
        path: folder in Hugging Face format.
        dtype: of its weights and products.
        parallel: how the axes are used.
        world: all processes, which call it together.

    Raises:
        ValueError: the folder is missing, incomplete or damaged, or the tp axis cannot share its heads.
    """
    config = DecoderConfig.from_directory(path)
    check_divisible(config, world.tp_size, whose="teacher")
    with torch.device("meta"):
        decoder = Decoder(config).to(dtype)
    model = TeacherModel(decoder)
    training = TrainingConfig(steps=1, compute_dtype=str(dtype).removeprefix("torch."))  # of which none is taken
    parallelize(model, decoder, world.mesh, training, parallel)
    materialize(model, torch.device("cpu") if parallel.cpu_offload else world.device)
    load_shards(decoder, path)
    return model
