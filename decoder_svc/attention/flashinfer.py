"""Paged attention on GPUs: prompts by flashinfer, single tokens by our own kernel.

flashinfer (Ye et al., MLSys 2025) plans a step on the host, which prompts can afford: one plan
serves all layers. The kernel for single tokens reads every length on the device, so that steps of
decoding can be captured as CUDA graphs and nothing is planned between them.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from chiasm.kernels.paged_decode import Lookup, Workspace, paged_decode
from chiasm.kernels.rotary import rotate_and_store
from decoder_svc.attention.base import AttentionBackend, AttentionBatch, DecodeStep
from decoder_svc.kv_cache.pool import KVPool
from decoder_svc.layers.rotary import Angles
from decoder_svc.staging import stage

_WORKSPACE_BYTES = 256 << 20
_HOPPER = (9, 0)


class FlashInferAttention(AttentionBackend):
    """Owns workspaces and the plan of the current step; the pages belong to the pool.

    Args:
        pool: Pages of bfloat16 or float16 on a GPU, stored head by head.
        num_heads: Query heads of this rank.
        tables: [seats, pages] int32 on the device: block tables by seat.
    """

    can_be_captured = True

    def __init__(self, pool: KVPool, *, num_heads: int, tables: torch.Tensor) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper  # needs a GPU

        self._pool = pool
        self._device = pool.keys.device
        self._num_heads = num_heads
        self._kv_heads, self._dim = pool.keys.shape[3:]
        self._scale = self._dim**-0.5
        self._tables = tables
        backend = "fa3" if torch.cuda.get_device_capability(self._device) == _HOPPER else "fa2"
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self._prefill: Any = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=backend)
        # A plan travels from a host buffer that the next one is written to.
        self._plan_is_there = torch.cuda.Event()
        self._workspace = Workspace.allocate(
            len(tables), num_heads, self._dim, self._device, self._kv_heads
        )
        self._lookup: Lookup | None = None
        self._num_single = 0
        self._slots = torch.empty(0, dtype=torch.int64, device=self._device)

    def plan(self, batch: AttentionBatch, slots: torch.Tensor) -> None:
        """See the base class."""
        self._slots = slots
        self._num_single = count = batch.num_single
        self._lookup = None
        if count:
            seats = stage(batch.seats[:count].astype(np.int32), self._device)
            lengths = stage((batch.starts[:count] + 1).astype(np.int32), self._device)
            self._lookup = Lookup(self._tables, seats, lengths)
        if count < len(batch.starts):
            self._plan_chunks(batch, count)

    def plan_decode(self, step: DecodeStep) -> None:
        """See the base class."""
        self._lookup = step.lookup
        self._slots = step.slots
        self._num_single = len(step.slots)

    def attend(self, layer: int, qkv: torch.Tensor, angles: Angles) -> torch.Tensor:
        """See the base class."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        queries = rotate_and_store(
            qkv.flatten(1),
            angles.cos,
            angles.sin,
            keys,
            values,
            self._slots,
            angles.interleaved,
        )
        count = self._num_single
        if self._lookup is None:
            return self._run_chunks(layer, queries, None)
        mixed = torch.empty_like(queries)
        single = (queries[:count], keys, values, self._lookup, self._scale, self._workspace)
        paged_decode(*single, out=mixed[:count])
        if count < len(queries):
            self._run_chunks(layer, queries[count:], mixed[count:])
        return mixed

    def _plan_chunks(self, batch: AttentionBatch, first: int) -> None:
        size = self._pool.block_size
        lengths = batch.lengths[first:]
        totals = batch.starts[first:] + lengths
        pages = -(-totals // size)
        indices = np.concatenate(
            [batch.block_tables[first + row, :count] for row, count in enumerate(pages)]
        )
        self._plan_is_there.synchronize()
        self._prefill.plan(
            _offsets(lengths),
            _offsets(pages),
            stage(indices.astype(np.int32), self._device),
            torch.from_numpy(((totals - 1) % size + 1).astype(np.int32)),
            self._num_heads,
            self._kv_heads,
            self._dim,
            size,
            causal=True,
            sm_scale=self._scale,
            q_data_type=self._pool.keys.dtype,
            kv_data_type=self._pool.keys.dtype,
        )
        self._plan_is_there.record()

    def _run_chunks(
        self, layer: int, queries: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        pages = (self._pool.stored_keys[layer], self._pool.stored_values[layer])
        mixed: torch.Tensor = self._prefill.run(queries, pages, out=out)
        return mixed


def _offsets(counts: np.ndarray) -> torch.Tensor:
    """[n + 1] int32 on the host: where each begins when laid end to end."""
    return torch.tensor([0, *itertools.accumulate(counts.tolist())], dtype=torch.int32)
