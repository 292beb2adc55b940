"""The memory of the pages: K and V over this stage's layers and this rank's KV heads."""

from __future__ import annotations

import math

import numpy as np
import torch

from decoder_svc.config.from_hf import TextConfig
from decoder_svc.parallel.mesh import ParallelMesh
from decoder_svc.parallel.stages import stage_layers


def page_bytes(
    config: TextConfig, mesh: ParallelMesh, *, block_size: int, dtype: torch.dtype
) -> int:
    """Bytes that one page takes on this rank, K and V of all its layers."""
    width = len(mesh.split_kv(config.num_kv_heads, config.head_dim))
    return 2 * len(stage_layers(config, mesh)) * block_size * width * dtype.itemsize


class KVPool:
    """K and V, each [layers, pages, page size, kv_heads, head_dim], zeroed.

    With `heads_first` a page is stored head by head, so that what a head reads lies together;
    otherwise `pairs` holds both, K before V token by token, so that one copy moves the two.

    Zeroed because padded reads touch pages never written, and a NaN there would pass a mask.

    Args:
        config: Layers and heads of the model.
        mesh: Which of them are this rank's.
        num_blocks: Pages.
        block_size: Tokens of a page.
        dtype: Of K and V.
        device: Where they live.
        heads_first: As the attention backend reads them.
    """

    def __init__(
        self,
        config: TextConfig,
        mesh: ParallelMesh,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        heads_first: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.heads_first = heads_first
        kv_heads = len(mesh.split_kv(config.num_kv_heads, config.head_dim)) // config.head_dim
        layers = len(stage_layers(config, mesh))
        self.pairs: torch.Tensor | None = None
        """[layers, pages, page size, 2 x kv_heads, head_dim]; None with `heads_first`."""
        if heads_first:
            shape = (layers, num_blocks, kv_heads, block_size, config.head_dim)
            self.stored_keys = _zeros(shape, dtype, device)
            self.stored_values = _zeros(shape, dtype, device)
            self.keys, self.values = (
                stored.transpose(2, 3) for stored in (self.stored_keys, self.stored_values)
            )
        else:
            shape = (layers, num_blocks, block_size, 2 * kv_heads, config.head_dim)
            self.pairs = _zeros(shape, dtype, device)
            self.keys, self.values = self.pairs.chunk(2, dim=3)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU of memory that the system hands out only as pages are first touched."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8)).view(dtype).view(shape)
