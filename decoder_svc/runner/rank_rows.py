"""Rows of media in the memory of the first rank, the slab's second bank: written there by NIXL,
given to the tensor parallel peers of the first stage over their own links."""

from __future__ import annotations

import threading
from contextlib import suppress
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from chiasm.config import DecoderConfig
from chiasm.errors import Unavailable
from chiasm.transport.agent import TransferAgent, nixl_is_installed
from chiasm.transport.base import DRAM, VRAM, Region
from decoder_svc.embeddings.bank_channel import At, Await, Heard, Renew, hear, say
from decoder_svc.parallel.mesh import ParallelMesh
from decoder_svc.runner.host_rows import HostRows


class RankRows:
    """Gathers rows from both banks, on every rank of the first stage alike.

    Args:
        mesh: Whose ranks take part. All of them call `gather` with the same rows.
        shape: [rows, width] of the bank.
        dtype: Of rows.
        device: Where they go.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._mesh = mesh
        self._shape = shape
        self._dtype = dtype
        self._device = device
        holds = mesh.is_first_stage and mesh.tp_rank == 0
        self.memory = torch.zeros(shape, dtype=dtype, device=device) if holds else None
        """The bank; None on ranks that do not hold it."""

    @property
    def region(self) -> Region:
        """Where the bank lies in this process."""
        assert self.memory is not None, "another rank holds it"
        kind = VRAM if self.memory.is_cuda else DRAM
        index = self.memory.device.index or 0
        return Region(self.memory.data_ptr(), self.memory.nbytes, kind, index)

    def gather(self, host: HostRows, slab_rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[R, width] on the device, a copy.

        Args:
            host: The first bank.
            slab_rows: [R], on the CPU: rows of the first bank, then of this one.
            dtype: Of the result.
        """
        here = slab_rows >= self._shape[0]
        if not here.any():
            return host.take(slab_rows, dtype)
        ours = self._share(slab_rows[here] - self._shape[0])
        if here.all():
            return ours.to(dtype)
        rows = torch.empty(len(slab_rows), self._shape[1], dtype=dtype, device=self._device)
        theirs = host.take(slab_rows[~here], dtype)
        rows[here.nonzero().flatten().to(self._device)] = ours.to(dtype)
        rows[(~here).nonzero().flatten().to(self._device)] = theirs
        return rows

    def _share(self, index: torch.Tensor) -> torch.Tensor:
        """[r, width] of the bank, on each of the stage's ranks."""
        if self.memory is not None:
            rows = self.memory.index_select(0, index.to(self._device))
        else:
            rows = torch.empty(len(index), self._shape[1], dtype=self._dtype, device=self._device)
        if self._mesh.tp_size > 1:
            source = self._mesh.rank - self._mesh.tp_rank
            dist.broadcast(rows, src=source, group=self._mesh.tp_group)
        return rows


def open_rank_rows(
    config: DecoderConfig,
    mesh: ParallelMesh,
    device: torch.device,
    *,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> RankRows | None:
    """The bank, where it is wanted. Call it before pages of K and V are taken.

    Every rank of the first stage gets one, or none does.

    Args:
        config: Of the decoder.
        mesh: The rank's place.
        device: Where it computes.
        shape: [rows, width] of the slab's first bank; this is just like it.
        dtype: Likewise.
    """
    if not mesh.is_first_stage or not bank_wanted(config, device):
        return None
    return RankRows(mesh, shape=shape, dtype=dtype, device=device)


def bank_wanted(config: DecoderConfig, device: torch.device) -> bool:
    """Whether rows may be written into the memory of the first rank."""
    wanted = config.memory.slab_memory
    if config.transport == "grpc" or wanted == "host":
        return False
    return wanted == "device" or (device.type == "cuda" and nixl_is_installed())


class BankKeeper:
    """Lets peers write into a bank that a rank holds, and tells the engine's process what arrived.

    A thread of its own, which ends with the channel. A rank that has no NIXL says nothing: nobody
    will write to it.

    Args:
        region: The bank.
        channel: To the engine's process.
    """

    def __init__(self, region: Region, channel: Connection) -> None:
        self._region = region
        self._channel = channel
        self._lock = threading.Lock()
        self._agent: TransferAgent | None = None
        self._num_awaited = 0
        threading.Thread(target=self._run, name="bank", daemon=True).start()

    def _run(self) -> None:
        with suppress(EOFError, OSError, Unavailable):
            self._renew()
            while True:
                message = hear(self._channel)
                if isinstance(message, Renew):
                    self._renew()
                elif isinstance(message, Await) and self._agent is not None:
                    self._num_awaited = message.count
                    self._agent.await_notices(message.count)
        if self._agent is not None:
            self._agent.close()
        self._channel.close()

    def _renew(self) -> None:
        old, self._agent = self._agent, TransferAgent((self._region,), on_notices=self._heard)
        if old is not None:
            old.close()
        self._agent.await_notices(self._num_awaited)
        region = self._region
        self._say(
            At(
                self._agent.name,
                self._agent.metadata,
                region.address,
                region.length,
                region.memory_type,
                region.device,
            )
        )

    def _heard(self, notices: list[bytes]) -> None:
        with suppress(OSError):
            self._say(Heard(tuple(notices)))

    def _say(self, message: At | Heard) -> None:
        with self._lock:
            say(self._channel, message)
