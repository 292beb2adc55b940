"""The slab's first bank as a rank reads it: host memory, pinned where the rank has a GPU.

From pageable memory a picture's rows take milliseconds: the driver copies them into memory of its
own first, while the caller waits. Pinned, they go over as they lie, run by run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class HostRows:
    """Takes rows out of the slab.

    Args:
        rows: [slab rows, width] on the CPU, shared with whoever writes them. Nothing is pinned when
            there are none, or when rows go to the CPU.
        device: Where they go.
    """

    def __init__(self, rows: Tensor, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and rows.numel() and _pin(rows):
            self._stream = torch.cuda.Stream(device)

    def take(self, slab_rows: Tensor, dtype: torch.dtype) -> Tensor:
        """[R, width] on the device: a copy, made when this returns.

        Args:
            slab_rows: [R], on the CPU.
            dtype: Of the result.
        """
        if self._stream is None:
            return self._rows.index_select(0, slab_rows).to(device=self._device, dtype=dtype)
        current = torch.cuda.current_stream(self._device)
        # On a stream of their own: the steps that are being computed are not waited for.
        with torch.cuda.stream(self._stream):
            size = (len(slab_rows), self._rows.shape[1])
            taken = torch.empty(size, dtype=self._rows.dtype, device=self._device)
            at = 0
            for first, count in runs(slab_rows):
                run = self._rows[first : first + count]
                taken[at : at + count].copy_(run, non_blocking=True)
                at += count
        self._stream.synchronize()
        taken.record_stream(current)
        return taken.to(dtype)

    def close(self) -> None:
        """Lets go of the slab."""
        if self._stream is not None:
            torch.cuda.cudart().cudaHostUnregister(self._rows.data_ptr())
            self._stream = None
        self._rows = torch.empty(0, self._rows.shape[1], dtype=self._rows.dtype)


def runs(slab_rows: Tensor) -> Iterator[tuple[int, int]]:
    """Neighbours in the slab that are wanted one after another: (first row, number)."""
    breaks = (slab_rows.diff() != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), len(slab_rows)]
    for begin, end in zip(edges, edges[1:], strict=False):
        if end > begin:
            yield int(slab_rows[begin]), end - begin


def _pin(rows: Tensor) -> bool:
    """Whether the memory is pinned now. It may be refused: limits of locked memory, containers."""
    cuda = torch.cuda.cudart()
    outcome = cuda.cudaHostRegister(rows.data_ptr(), rows.nbytes, 0)
    if outcome == cuda.cudaError.success:
        return True
    logger.warning("the slab cannot be pinned (%s): rows from it go to the GPU slower", outcome)
    return False
