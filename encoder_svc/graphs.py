"""Forwards replayed as CUDA graphs: one launch for a batch whose grids come again and again.

A tower is hundreds of small launches, each of which needs the interpreter, which threads that
decode pictures and serve streams want too. A graph is of exact grids: the same kernels on the same
shapes as without it, and the same bits.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chiasm.plan import Grid
from encoder_svc.models.base import VisionTower

logger = logging.getLogger(__name__)

_REMEMBERED = 1024  # lists of grids, and how often they came
_FAMILIAR = 4  # times: recording stops the tower for some forwards' time


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    patches: Tensor
    rows: Tensor


class GraphedTower:
    """A tower on a GPU. One thread uses it.

    Args:
        tower: Its weights are in place.
        keep: Graphs kept, the last used; each holds its patches and its rows.
        max_patches: Larger batches take so long that their launches hide behind them.
    """

    def __init__(self, tower: VisionTower, *, keep: int, max_patches: int) -> None:
        self._tower = tower
        self._keep = keep
        self._max_patches = max_patches
        self._graphs: OrderedDict[tuple[Grid, ...], _Graph] = OrderedDict()
        self._seen: OrderedDict[tuple[Grid, ...], int] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Rows, to be used up before the next call: a graph writes to the same place every time."""
        key = tuple(grids)
        found = self._graphs.get(key)
        if found is None and self._is_familiar(key):
            found = self._try_capture(patches, key)
        if found is None:
            rows: Tensor = self._tower(patches, grids)
            return rows
        self._graphs.move_to_end(key)
        found.patches.copy_(patches)
        found.graph.replay()
        return found.rows

    def _is_familiar(self, key: tuple[Grid, ...]) -> bool:
        """Whether these grids have come often enough, and are small enough."""
        if self._keep < 1 or sum(grid.patches for grid in key) > self._max_patches:
            return False
        times = self._seen.pop(key, 0) + 1
        if times == _FAMILIAR:
            return True
        self._seen[key] = times
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return False

    def _try_capture(self, patches: Tensor, key: tuple[Grid, ...]) -> _Graph | None:
        """None where it fails. Then no other is tried: the memory that graphs share is still
        marked as being recorded into. Those that are there go on being replayed."""
        stream = torch.cuda.current_stream(patches.device) if patches.is_cuda else None
        try:
            return self._capture(patches, key)
        except RuntimeError:  # of CUDA or its allocator: out of memory, a recording that was ended
            self._keep = 0
            if stream is not None:
                torch.cuda.set_stream(stream)  # a recording that fails to end leaves its own
            logger.exception("the tower's forwards are no longer recorded as graphs")
            return None

    def _capture(self, patches: Tensor, key: tuple[Grid, ...]) -> _Graph:
        """When these grids ran before, whatever they need was compiled and tuned."""
        if len(self._graphs) >= self._keep:
            self._graphs.popitem(last=False)
        static = patches.clone()
        graph = torch.cuda.CUDAGraph()
        # torch hands out 32 streams over and over, but for each priority others: what some thread
        # orders on the stream that is recorded would be recorded as well, or end the recording.
        stream = torch.cuda.Stream(patches.device, priority=-1)
        # Other threads go on allocating and copying meanwhile: only this one's calls are checked.
        recording = torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        )
        with recording:
            rows = self._tower(static, key)
        made = self._graphs[key] = _Graph(graph, static, rows)
        return made
