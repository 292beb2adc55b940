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
from decoder_svc.layers.rotary import Angles, rotate


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
        self._pool = pool
        self._device = pool.keys.device
        self._slots = torch.empty(0, dtype=torch.int64, device=self._device)
        self._single: _Single | None = None
        self._chunks: list[_Chunk] = []

    def plan(self, batch: AttentionBatch, slots: torch.Tensor) -> None:
        """See the base class."""
        size, count, dtype = self._pool.block_size, batch.num_single, self._pool.keys.dtype
        self._slots = slots
        self._single = _Single(batch, size, self._device, dtype) if count else None
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
        paged_keys, paged_values = self._pool.keys[layer], self._pool.values[layer]
        kv_heads = paged_keys.shape[2]
        turned, values = rotate(qkv[:, :-kv_heads], angles), qkv[:, -kv_heads:]
        queries, keys = turned[:, :-kv_heads], turned[:, -kv_heads:]
        paged_keys.flatten(0, 1).index_copy_(0, self._slots, keys)
        paged_values.flatten(0, 1).index_copy_(0, self._slots, values)
        parts = []
        if self._single is not None:
            parts.append(self._attend_single(self._single, queries, paged_keys, paged_values))
        for chunk in self._chunks:
            own = chunk.tokens
            if chunk.start == 0:
                mixed = _attention(queries[own], keys[own], values[own], None)
            else:
                seen_keys = _read(paged_keys, chunk.pages)[: chunk.total]
                seen_values = _read(paged_values, chunk.pages)[: chunk.total]
                mixed = _attention(queries[own], seen_keys, seen_values, chunk.mask)
            parts.append(mixed)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_single(
        self,
        single: _Single,
        queries: torch.Tensor,
        paged_keys: torch.Tensor,
        paged_values: torch.Tensor,
    ) -> torch.Tensor:
        count, kv_heads, dim = single.count, *paged_keys.shape[2:]
        heads = queries.shape[1]
        keys = _read(paged_keys, single.pages).view(count, -1, kv_heads, dim)
        values = _read(paged_values, single.pages).view(count, -1, kv_heads, dim)
        # The query heads that share a KV head become that head's rows: no K or V is repeated.
        grouped = queries[:count].reshape(count, kv_heads, heads // kv_heads, dim)
        mixed = F.scaled_dot_product_attention(
            grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=single.mask
        )
        return mixed.reshape(count, heads, dim)


def _read(paged: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Whole pages end to end: [P x page size, kv_heads, dim]."""
    num_blocks, size, kv_heads, dim = paged.shape
    copied = paged.view(num_blocks, -1).index_select(0, pages)
    return copied.view(-1, kv_heads, dim)


def _attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """One sequence: queries [T, heads, dim], keys and values [L, kv_heads, dim]."""
    mixed = F.scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return mixed.squeeze(0).transpose(0, 1)
