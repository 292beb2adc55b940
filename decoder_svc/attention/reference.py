"""The reference backend: pages are gathered, torch's own attention does the rest. CPU and CUDA.

Sequences of one token (decoding) run as one padded call; the others run one by one, each under a
causal mask shifted by what it has in pages.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from decoder_svc.attention.base import AttentionBackend, AttentionBatch
from decoder_svc.kv_cache.pool import KVPool
from decoder_svc.layers.rotary import Angles, rotate_


class _Single:
    """The padded read of all sequences of one token: pages [S x P], mask [S, 1, 1, L]."""

    def __init__(
        self, batch: AttentionBatch, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        count = batch.num_single
        totals = batch.starts[:count] + 1
        pages = -(-int(totals.max()) // block_size)
        seen = np.arange(pages * block_size) < totals[:, None]
        self.count = count
        self.pages = torch.from_numpy(batch.block_tables[:count, :pages].reshape(-1)).to(device)
        # Added to scores, as torch's attention would make of booleans in every layer anew.
        mask = np.where(seen, np.float32(0.0), np.float32("-inf"))[:, None, None, :]
        self.mask = torch.from_numpy(mask).to(device=device, dtype=dtype)


class _Chunk:
    """One sequence's read: its tokens' range in the step, pages [P], mask [T, L] or causal."""

    def __init__(self, table: np.ndarray, first: int, start: int, length: int) -> None:
        self.tokens = slice(first, first + length)
        self.start = start
        self.total = start + length
        self.table = table
        self.mask: torch.Tensor | None = None

    def place(self, block_size: int, device: torch.device) -> None:
        """Builds the tensors; a chunk that starts its sequence reads nothing back."""
        if self.start == 0:
            return
        self.pages = torch.from_numpy(self.table[: -(-self.total // block_size)]).to(device)
        rows = torch.arange(self.start, self.total, device=device)
        self.mask = rows[:, None] >= torch.arange(self.total, device=device)


class ReferenceAttention(AttentionBackend):
    """Owns nothing but the plan of the current step; the pages belong to the pool."""

    def __init__(self, pool: KVPool) -> None:
        assert pool.pairs is not None, "K and V lie token by token"
        self._block_size = pool.block_size
        self._device, self._dtype = pool.pairs.device, pool.pairs.dtype
        # Per layer, K and V together: by token [pages x page size, 2 x kv_heads, dim], and by page.
        self._by_token = pool.pairs.flatten(1, 2).unbind()
        self._by_page = pool.pairs.flatten(2).unbind()
        self._slots = torch.empty(0, dtype=torch.int64, device=self._device)
        self._single: _Single | None = None
        self._chunks: list[_Chunk] = []

    def plan(self, batch: AttentionBatch, slots: torch.Tensor) -> None:
        """See the base class."""
        size, count = self._block_size, batch.num_single
        self._slots = slots
        self._single = _Single(batch, size, self._device, self._dtype) if count else None
        self._chunks = []
        first = count
        for index in range(count, len(batch.starts)):
            start, length = int(batch.starts[index]), int(batch.lengths[index])
            chunk = _Chunk(batch.block_tables[index], first, start, length)
            chunk.place(size, self._device)
            self._chunks.append(chunk)
            first += length

    def attend(self, layer: int, qkv: torch.Tensor, angles: Angles) -> torch.Tensor:
        """See the base class."""
        by_token = self._by_token[layer]
        kv_heads = by_token.shape[1] // 2
        heads = qkv.shape[1] - 2 * kv_heads
        rotate_(qkv[:, : heads + kv_heads], angles)
        queries, pairs = qkv[:, :heads], qkv[:, heads:]
        by_token.index_copy_(0, self._slots, pairs)
        parts = []
        if self._single is not None:
            seen = self._read(layer, self._single.pages)
            parts.append(_attend_single(self._single, queries, seen))
        for chunk in self._chunks:
            own = chunk.tokens
            seen = pairs[own] if chunk.start == 0 else self._read(layer, chunk.pages)[: chunk.total]
            parts.append(_attention(queries[own], seen, chunk.mask))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """K and V of whole pages end to end: [P x page size, 2 x kv_heads, dim]."""
        copied = self._by_page[layer].index_select(0, pages)
        return copied.view(-1, *self._by_token[layer].shape[1:])


def _attend_single(single: _Single, queries: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Sequences of one token: queries [T, heads, dim], K and V [S x L, 2 x kv_heads, dim]."""
    count, (heads, dim) = single.count, queries.shape[1:]
    seen = pairs.view(count, -1, *pairs.shape[1:]).transpose(1, 2)
    kv_heads = seen.shape[1] // 2
    # The query heads that share a KV head become that head's rows: no K or V is repeated.
    grouped = queries[:count].reshape(count, kv_heads, heads // kv_heads, dim)
    mixed = F.scaled_dot_product_attention(
        grouped, seen[:, :kv_heads], seen[:, kv_heads:], attn_mask=single.mask
    )
    return mixed.reshape(count, heads, dim)


def _attention(
    queries: torch.Tensor, pairs: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """One sequence: queries [T, heads, dim], K and V [L, 2 x kv_heads, dim]."""
    seen = pairs.transpose(0, 1).unsqueeze(0)
    kv_heads = seen.shape[1] // 2
    mixed = F.scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        seen[:, :kv_heads],
        seen[:, kv_heads:],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=queries.shape[1] != kv_heads,
    )
    return mixed.squeeze(0).transpose(0, 1)
