"""Layouts of batches, kept: a fleet sees the same few sizes over and over.

A layout follows from the grids of a batch alone, so it is made once for a list of grids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from chiasm.plan import Grid

_KEPT = 64  # layouts; one of 16384 patches in windows takes 6 MB at head dim 80

LayoutT = TypeVar("LayoutT")


class KeptLayouts(Generic[LayoutT]):
    """The layouts last used. One thread at a time.

    Args:
        make: Lays out the grids of a batch on a device.
    """

    def __init__(self, make: Callable[[Sequence[Grid], torch.device], LayoutT]) -> None:
        self._make = make
        self._kept: OrderedDict[tuple[tuple[Grid, ...], torch.device], LayoutT] = OrderedDict()

    def of(self, grids: Sequence[Grid], device: torch.device) -> LayoutT:
        """The layout of a batch of these grids."""
        key = (tuple(grids), device)
        layout = self._kept.get(key)
        if layout is None:
            layout = self._kept[key] = self._make(grids, device)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return layout
