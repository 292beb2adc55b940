"""What rows of the model are written to: a list, or real memory that a NIXL agent writes to."""

from __future__ import annotations

from typing import Protocol

import torch

from chiasm.transport import DRAM, Region
from chiasm.transport.agent import TransferAgent

ROW = 2  # bytes: the first of the digest, and the row


class SlabMemory(Protocol):
    """The rows of one decoder's slab."""

    def write(self, slab_row: int, digest: bytes, row: int) -> None: ...

    def read(self, slab_row: int) -> tuple[bytes, int]: ...


class ListMemory:
    """Names of rows."""

    def __init__(self, num_rows: int) -> None:
        self._cells: list[tuple[bytes, int]] = [(b"", 0)] * num_rows

    def write(self, slab_row: int, digest: bytes, row: int) -> None:
        self._cells[slab_row] = (digest, row)

    def read(self, slab_row: int) -> tuple[bytes, int]:
        return self._cells[slab_row]


class Writer:
    """An agent whose memory holds every row there can be."""

    def __init__(self) -> None:
        digests, rows = torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij")
        self._rows = torch.stack((digests, rows), dim=-1).to(torch.uint8).contiguous()
        self._region = Region(self._rows.data_ptr(), self._rows.nbytes, DRAM)
        self.agent = TransferAgent((self._region,))

    def write(self, target: str, place: Region, digest: bytes, row: int) -> None:
        piece = (self._region, (digest[0] * 256 + row) * ROW, ROW)
        self.agent.write(target, [piece], [place], b"row").result(30)


class NixlMemory:
    """Bytes, registered with an agent of their own; kept over many worlds."""

    def __init__(self, num_rows: int, writer: Writer) -> None:
        self._bytes = torch.zeros(num_rows * ROW, dtype=torch.uint8)
        self._region = Region(self._bytes.data_ptr(), self._bytes.nbytes, DRAM)
        self._writer = writer
        self.agent = TransferAgent((self._region,))
        self.agent.await_notices(1)
        writer.agent.connect(self.agent.name, self.agent.metadata).result(30)

    def write(self, slab_row: int, digest: bytes, row: int) -> None:
        place = Region(self._region.address + slab_row * ROW, ROW, DRAM)
        self._writer.write(self.agent.name, place, digest, row)

    def read(self, slab_row: int) -> tuple[bytes, int]:
        digest, row = self._bytes[slab_row * ROW : (slab_row + 1) * ROW].tolist()
        return bytes([digest]), row
