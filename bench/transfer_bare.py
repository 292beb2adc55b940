"""The floor of `bench.transfer`: bare NIXL WRITEs between two processes, nothing around them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from chiasm.transport.base import DRAM, VRAM, Region


def run_target(device: str, nbytes: int, pipe: Connection) -> None:
    """Memory that is written to by a bare NIXL WRITE; polls without a pause."""
    memory, region = _registered(device, nbytes)
    agent = _bare_agent(region)
    pipe.send((agent.name, agent.get_agent_metadata(), region))
    while not pipe.poll():
        for _ in range(1000):
            agent.get_new_notifs()
    del memory


def run_writer(
    device: str,
    target: tuple[str, bytes, Region],
    work: Sequence[tuple[int, int]],
    pipe: Connection,
) -> None:
    """A prepared WRITE, posted again and again; sends a list of seconds for each pair."""
    name, metadata, theirs = target
    memory, region = _registered(device, theirs.length)
    agent = _bare_agent(region)
    agent.add_remote_agent(metadata)
    for nbytes, repeats in work:
        local = agent.get_xfer_descs([(region.address, nbytes, region.device)], region.memory_type)
        remote = agent.get_xfer_descs([(theirs.address, nbytes, theirs.device)], theirs.memory_type)
        handle = agent.initialize_xfer("WRITE", local, remote, name, b"")
        seconds = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            seconds.append(time.perf_counter() - began)
            assert state == "DONE", state
        agent.release_xfer_handle(handle)
        pipe.send(seconds[1:])
    del memory


def _registered(device: str, nbytes: int) -> tuple[torch.Tensor, Region]:
    if device == "pinned":
        memory = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    else:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    kind = VRAM if memory.is_cuda else DRAM
    return memory, Region(memory.data_ptr(), nbytes, kind, memory.device.index or 0)


def _bare_agent(region: Region):  # type: ignore[no-untyped-def]
    from chiasm.transport.agent import load_nixl

    nixl = load_nixl()
    config = nixl.config(enable_prog_thread=False, backends=["UCX"])
    agent = nixl.agent(f"bare-{secrets.token_hex(4)}", config)
    place = [(region.address, region.length, region.device, "")]
    agent.register_memory(place, region.memory_type)
    return agent
