"""The KV cache of the running sequences, and the decoder's attention over it.

Row b of the cache belongs to running sequence b. The sequences that decode are the first rows, so that what a step
attends to is a view of the cache and never a copy.

Shape suffixes: T packed tokens of a step, N query heads, M key-value heads, G = N / M, D dimensions of a head,
R decoding sequences, J joining sequences, S positions of the longest decoding sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_opd.models import DecoderConfig, PackedAttention


class KVCache:
    """Keys and values of every layer, two tensors [layers, rows, M, positions, D].

    Args:
        config: of the decoder.
        num_rows: sequences that can run at the same time.
        num_positions: tokens of a sequence, its prompt included.
        dtype, device: the decoder's.
    """

    def __init__(
        self, config: DecoderConfig, num_rows: int, num_positions: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_positions = num_positions
        shape = (config.num_layers, num_rows, config.num_kv_heads, num_positions, config.head_dim)
        # Zeros, because a masked position still takes part with weight 0, and 0 * NaN is NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def move_row(self, source: int, target: int, num_positions: int) -> None:
        """Copy the first `num_positions` positions of one row over those of another."""
        for tensor in (self.keys, self.values):
            tensor[:, target, :, :num_positions] = tensor[:, source, :, :num_positions]


class StepAttention:
    """The `Attention` of one step: sequences that run decode one token each, others bring all their tokens so far.

    A step's tokens are packed: first one token for each of the rows 0 .. R - 1, then the whole texts of J consecutive
    rows, one after the other. All keys and values are written into the cache.

    Args:
        cache: where the rows' earlier keys and values are.
        decode_positions_R: [R] int64, position of each decoding sequence's token, equal to the number of its earlier
            tokens.
        text_lengths: J numbers of tokens.
        first_text_row: the first of the J rows; None is R.
        read_all: let the decoding sequences read every position of the cache, the unwritten ones with weight 0, so
            that the shapes of the products do not depend on the lengths; otherwise the longest one bounds them.
    """

    def __init__(
        self,
        cache: KVCache,
        decode_positions_R: Tensor,
        text_lengths: Sequence[int],
        *,
        first_text_row: int | None = None,
        read_all: bool = False,
    ) -> None:
        self._cache = cache
        self._num_decoding = len(decode_positions_R)
        device = decode_positions_R.device
        rows_R = torch.arange(self._num_decoding, device=device)
        if self._num_decoding:
            # What a sequence has not written is masked with -inf, added to its scores.
            num_positions = cache.num_positions if read_all else int(decode_positions_R.max()) + 1
            unseen_RS = torch.arange(num_positions, device=device) > decode_positions_R[:, None]
            self._mask_R11S = torch.zeros(unseen_RS.shape, dtype=cache.keys.dtype, device=device)
            self._mask_R11S = self._mask_R11S.masked_fill_(unseen_RS, -torch.inf)[:, None, None]
        if not text_lengths:
            self._rows_T, self.positions_T = rows_R, decode_positions_R
            return
        lengths_J = torch.tensor(text_lengths, device=device)
        starts_J = lengths_J.cumsum(0) - lengths_J
        num_tokens = sum(text_lengths)
        first_text_row = self._num_decoding if first_text_row is None else first_text_row
        text_rows = torch.arange(first_text_row, first_text_row + len(text_lengths), device=device)
        text_positions = torch.arange(num_tokens, device=device) - starts_J.repeat_interleave(
            lengths_J, output_size=num_tokens
        )
        self._rows_T = torch.cat([rows_R, text_rows.repeat_interleave(lengths_J, output_size=num_tokens)])
        self.positions_T = torch.cat([decode_positions_R, text_positions])
        cu_seqlens = F.pad(lengths_J.cumsum(0), (1, 0)).int()
        self._texts = PackedAttention(cu_seqlens, max(text_lengths))

    def __call__(self, layer: int, query_TND: Tensor, key_TMD: Tensor, value_TMD: Tensor) -> Tensor:
        self._cache.keys[layer][self._rows_T, :, self.positions_T] = key_TMD
        self._cache.values[layer][self._rows_T, :, self.positions_T] = value_TMD
        num_decoding = self._num_decoding
        if num_decoding == len(query_TND):
            return self._decode(layer, query_TND)
        texts = (x[num_decoding:] for x in (query_TND, key_TMD, value_TMD))
        output = self._texts(layer, *texts)
        if not num_decoding:
            return output
        return torch.cat([self._decode(layer, query_TND[:num_decoding]), output])

    def _decode(self, layer: int, query_RND: Tensor) -> Tensor:
        rows, num_positions = len(query_RND), self._mask_R11S.shape[-1]
        keys_RMSD = self._cache.keys[layer, :rows, :, :num_positions]
        values_RMSD = self._cache.values[layer, :rows, :, :num_positions]
        # The G query heads of a key-value head stand where queries of different positions usually do: all of them
        # see the same keys, which are read once and never repeated.
        query_RMGD = query_RND.unflatten(1, (keys_RMSD.shape[1], -1))
        output_RMGD = F.scaled_dot_product_attention(query_RMGD, keys_RMSD, values_RMSD, attn_mask=self._mask_R11S)
        return output_RMGD.flatten(1, 2)
