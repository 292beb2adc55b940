"""Where a matrix lies inside what a checkpoint stores: alone, in a joined tensor, or among experts.

    gate, up           mlp.gate_up_proj.weight                 [2 x width, hidden]
    q, k, v            self_attn.wqkv.weight                   [KV heads x (their q, k, v), hidden]
    all experts' own   mlp.experts.gate_up_proj                [experts, 2 x width, hidden]
                       mlp.experts.down_proj                   [experts, hidden, width]
                       or both with their last two dimensions swapped, as hubs have them

Names are those of one layout (`decoder_svc.models.weights` maps the others to it). Weights of 8
bits have a number for each block of 128 x 128 beside them (`..._scale_inv`): both are read as they
are where a layer can use them, else they are multiplied out as they are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from chiasm.kernels.block_scaled import BLOCK
from chiasm.stored_tensor import Block, StoredTensor

Shape = tuple[int, ...]
Find = Callable[[str], StoredTensor | None]
"""A stored tensor by name, to be sliced and asked for its shape; None where there is none."""

_QKV = re.compile(r"(.*)\.([qkv])_proj\.weight")
_HALF = re.compile(r"(.*)\.(gate|up)_proj\.weight")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_WHOLE = slice(None)
SCALES = "_scale_inv"


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of attention, which says how a joint tensor of q, k and v is cut."""

    kv_heads: int
    """Groups of it."""
    queries: int
    """Heads of q in a group; one of k and one of v follow them."""
    width: int
    """Rows of a head."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a checkpoint joins what may be joined in several ways."""

    swapped: bool = False
    """Whether fused experts have their last two dimensions swapped."""
    heads: Heads | None = None


_ALONE = Packing()


@dataclass(frozen=True, slots=True)
class Stripes:
    """Rows that lie in equal stretches, at equal distances from the first one's beginning."""

    size: int
    every: int

    def cut(self, rows: slice) -> list[slice]:
        """Where rows lie, counted from the first stretch."""
        first, last = rows.start // self.size, (rows.stop - 1) // self.size
        found = []
        for stretch in range(first, last + 1):
            begin = max(rows.start - stretch * self.size, 0)
            end = min(rows.stop - stretch * self.size, self.size)
            found.append(slice(stretch * self.every + begin, stretch * self.every + end))
        return found


@dataclass(frozen=True, slots=True)
class Piece:
    """A vector or matrix as a part of a stored tensor. Asking for blocks of it reads nothing."""

    stored: str
    tensor: StoredTensor
    shape: Shape
    first_row: int = 0
    expert: int | None = None
    swapped: bool = False
    scales: StoredTensor | None = None
    """Of a tensor of 8 bits, as the tensor itself lies."""
    stripes: Stripes | None = None
    """Of rows that do not follow each other."""

    def blocks(self, rows: slice = _WHOLE, columns: slice = _WHOLE) -> list[Block]:
        """The part of it that is asked for, where it lies: with `swapped` a line for each column.

        Steps are not supported.

        Returns:
            One block, or several with the rows in order.
        """
        own = self._stretches(rows)
        if len(self.shape) == 1:
            return [self.tensor.rows(stretch.start, stretch.stop) for stretch in own]
        cut = [self._as_it_lies(stretch, columns) for stretch in own]
        return [self.tensor.rectangle(*places, self._index) for places in cut]

    def scale_blocks(self, rows: slice = _WHOLE, columns: slice = _WHOLE) -> list[Block]:
        """The scales of the part that is asked for, of a matrix that is not swapped."""
        cut = [self._as_it_lies(stretch, columns) for stretch in self._stretches(rows)]
        return [self._scales_of(places) for places in cut]

    def multiplied_out(
        self, rows: slice = _WHOLE, columns: slice = _WHOLE, *, device: torch.device
    ) -> torch.Tensor:
        """The part of it that is asked for, of a matrix with scales, multiplied on the device."""
        cut = [self._as_it_lies(stretch, columns) for stretch in self._stretches(rows)]
        part = torch.cat([self._scaled(places, device) for places in cut])
        return part.t() if self.swapped else part

    def _scales_of(self, places: tuple[slice, slice]) -> Block:
        assert self.scales is not None, "only where blocks have scales"
        rows, columns = (slice(s.start // BLOCK, -(-s.stop // BLOCK)) for s in places)
        return self.scales.rectangle(rows, columns, self._index)

    def _scaled(self, places: tuple[slice, slice], device: torch.device) -> torch.Tensor:
        scales = _matrix(self._scales_of(places), device).float()
        for axis, kept in enumerate(places):
            first = kept.start % BLOCK
            scales = scales.repeat_interleave(BLOCK, axis).narrow(
                axis, first, kept.stop - kept.start
            )
        return _matrix(self.tensor.rectangle(*places, self._index), device).float() * scales

    @property
    def _index(self) -> int:
        return self.expert or 0

    def _stretches(self, rows: slice) -> list[slice]:
        """Where the rows lie in the stored tensor."""
        begin, end, _ = rows.indices(self.shape[0])
        cuts = [slice(begin, end)]
        if self.stripes is not None:
            cuts = self.stripes.cut(cuts[0])
        return [slice(self.first_row + cut.start, self.first_row + cut.stop) for cut in cuts]

    def _as_it_lies(self, rows: slice, columns: slice) -> tuple[slice, slice]:
        begin, end, _ = columns.indices(self.shape[1])
        across = slice(begin, end)
        return (across, rows) if self.swapped else (rows, across)


def _matrix(block: Block, device: torch.device) -> torch.Tensor:
    return block.read().view(block.lines, -1).to(device)


def locate(name: str, find: Find, packing: Packing = _ALONE) -> Piece | None:
    """The piece called `name`, wherever it lies, with the scales of its blocks if it has any.

    Args:
        name: In the one layout.
        find: Looks stored tensors up.
        packing: The checkpoint's.
    """
    piece = _locate(name, find, packing)
    if piece is None or (scales := find(f"{piece.stored}{SCALES}")) is None:
        return piece
    return replace(piece, scales=scales)


def _locate(name: str, find: Find, packing: Packing) -> Piece | None:
    if (whole := find(name)) is not None:
        return Piece(name, whole, whole.shape)
    if match := _EXPERT.fullmatch(name):
        return _expert(match, find, swapped=packing.swapped)
    if packing.heads is not None and (match := _QKV.fullmatch(name)):
        return _head_rows(match, find, packing.heads)
    if match := _HALF.fullmatch(name):
        stored = f"{match[1]}.gate_up_proj.weight"
        if (joined := find(stored)) is not None:
            height, width = joined.shape
            first = height // 2 if match[2] == "up" else 0
            return Piece(stored, joined, (height // 2, width), first)
    return None


def _head_rows(match: re.Match[str], find: Find, heads: Heads) -> Piece | None:
    """q, k or v of a joint tensor. Raises ValueError where it is not of these heads."""
    stored = f"{match[1]}.wqkv.weight"
    if (joined := find(stored)) is None:
        return None
    rows, hidden = joined.shape
    every = (heads.queries + 2) * heads.width
    if rows != heads.kv_heads * every:
        raise ValueError(
            f"tensor {stored} has {rows} rows in the checkpoint, {heads.kv_heads * every} by the "
            "config"
        )
    size = heads.width * (heads.queries if match[2] == "q" else 1)
    first = heads.width * {"q": 0, "k": heads.queries, "v": heads.queries + 1}[match[2]]
    shape = (heads.kv_heads * size, hidden)
    return Piece(stored, joined, shape, first, stripes=Stripes(size, every))


def experts_are_swapped(find: Find, names: tuple[str, ...], *, hidden: int, width: int) -> bool:
    """Whether fused experts are stored with their last two dimensions swapped.

    Told by shape: of the two tensors at least one is no square.
    """
    for name in names:
        down, gate_up = find(f"{name}.down_proj"), find(f"{name}.gate_up_proj")
        if down is not None and hidden != width:
            return down.shape[1:] == (width, hidden)
        if gate_up is not None:
            return gate_up.shape[1:] == (hidden, 2 * width)
    return False


def _expert(match: re.Match[str], find: Find, *, swapped: bool) -> Piece | None:
    experts, index, part = match[1], int(match[2]), match[3]
    stored = f"{experts}.down_proj" if part == "down" else f"{experts}.gate_up_proj"
    fused = find(stored)
    if fused is None or index >= fused.shape[0]:
        return None
    height, width = fused.shape[:0:-1] if swapped else fused.shape[1:]
    if part == "down":
        return Piece(stored, fused, (height, width), 0, index, swapped)
    first = height // 2 if part == "up" else 0
    return Piece(stored, fused, (height // 2, width), first, index, swapped)
