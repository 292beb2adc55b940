"""The slab's second bank: memory of a rank, written by peers, told of over a pipe."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from multiprocessing import Pipe

import pytest
import torch

from chiasm.transport import DRAM, Region
from chiasm.transport.agent import TransferAgent
from chiasm.transport.base import HOST_BANK, RANK_BANK
from chiasm.transport.grpc import StreamReceiver
from chiasm.transport.landing import LocalLanding
from chiasm.transport.nixl import NixlReceiver
from decoder_svc.embeddings.bank_channel import At, Await, BankPort, Heard, Renew, hear, say
from decoder_svc.embeddings.rank_landing import RankLanding
from decoder_svc.parallel.mesh import ParallelMesh
from decoder_svc.runner.host_rows import HostRows, runs
from decoder_svc.runner.rank_rows import BankKeeper, RankRows
from tests.waiting import until

CPU = torch.device("cpu")


def rank_rows(rows: int = 8, width: int = 4) -> RankRows:
    return RankRows(ParallelMesh(), shape=(rows, width), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("wanted", [[0, 3], [8, 15], [1, 9, 2, 8, 0], []])
def test_rows_of_both_banks_come_in_the_order_asked_for(wanted: list[int]) -> None:
    host = torch.arange(32.0).view(8, 4)
    bank = rank_rows()
    assert bank.memory is not None
    bank.memory.copy_(100 + host)
    rows = bank.gather(HostRows(host, CPU), torch.tensor(wanted, dtype=torch.int64), torch.float64)
    both = torch.cat((host, 100 + host)).double()
    assert torch.equal(rows, both[wanted])
    bank.memory.zero_()
    assert torch.equal(rows, both[wanted]), "a copy: slots may be reused"


@pytest.mark.parametrize(
    ("wanted", "found"),
    [([], []), ([4], [(4, 1)]), ([3, 4, 5, 1, 2, 2, 3], [(3, 3), (1, 2), (2, 2)])],
)
def test_neighbours_in_the_slab_go_over_in_one_copy(
    wanted: list[int], found: list[tuple[int, int]]
) -> None:
    assert list(runs(torch.tensor(wanted, dtype=torch.int64))) == found


def test_only_the_first_rank_of_the_first_stage_holds_the_bank() -> None:
    for mesh in (ParallelMesh(tp_rank=1, tp_size=2), ParallelMesh(pp_rank=1, pp_size=2)):
        shape = (2, 2)
        assert RankRows(mesh, shape=shape, dtype=torch.float32, device=CPU).memory is None


@pytest.mark.parametrize(
    "message",
    [At("a.0", b"\0md", 1 << 47, 9, DRAM, 1), Heard((b"x", b"")), Await(3), Renew()],
)
def test_messages_survive_the_pipe(message) -> None:
    ours, theirs = Pipe()
    say(ours, message)
    assert hear(theirs) == message


class Bank:
    """A keeper, the engine's side of it, and a peer that writes."""

    def __init__(self) -> None:
        self.rows = rank_rows()
        self.landing = RankLanding()
        self.source = torch.full((64,), 7, dtype=torch.uint8)
        self.region = Region(self.source.data_ptr(), 64, DRAM)
        self.agent = TransferAgent((self.region,))
        self.start()

    def start(self) -> None:
        ours, theirs = Pipe()
        BankKeeper(self.rows.region, theirs)
        self.landing.attach(ours)

    async def there(self) -> None:
        await until(lambda: self.landing.peer is not None)

    async def write(self, notice: bytes, offset: int = 0) -> None:
        peer, region = self.landing.peer, self.landing.region
        assert peer is not None
        done = self.agent.connect(peer.agent_name, peer.agent_metadata)
        await asyncio.wrap_future(done)
        target = [Region(region.address + offset, 64, DRAM)]
        pieces = [(self.region, 0, 64)]
        await asyncio.wrap_future(self.agent.write(peer.agent_name, pieces, target, notice))


@pytest.fixture
async def bank() -> AsyncIterator[Bank]:
    it = Bank()
    await it.there()
    yield it
    it.landing.detach()
    it.agent.close()


async def test_what_is_written_to_a_rank_is_heard_of_in_the_engine(bank: Bank) -> None:
    bank.landing.arrivals.expect(b"n")
    await bank.write(b"n", offset=64)
    assert await bank.landing.arrivals.wait(b"n")
    assert bank.rows.memory is not None
    found = bank.rows.memory.view(torch.uint8).flatten()
    assert found[64:128].eq(7).all() and not found[:64].any()
    assert not await bank.landing.arrivals.wait(b"never expected")


async def test_a_new_agent_takes_the_place_of_the_old(bank: Bank) -> None:
    before, generation = bank.landing.peer, bank.landing.generation
    await asyncio.gather(bank.landing.renew(generation), bank.landing.renew(generation))
    assert before is not None and bank.landing.peer is not None
    assert bank.landing.generation == generation + 1
    assert bank.landing.peer.agent_name != before.agent_name
    bank.landing.arrivals.expect(b"n")
    await bank.write(b"n")
    assert await bank.landing.arrivals.wait(b"n")


async def test_a_rank_that_dies_takes_its_memory_with_it(bank: Bank) -> None:
    bank.landing.arrivals.expect(b"n")
    waiting = asyncio.create_task(bank.landing.arrivals.wait(b"n"))
    await asyncio.sleep(0)
    generation = bank.landing.generation
    bank.landing.detach()
    assert not await waiting
    assert bank.landing.peer is None and bank.landing.generation > generation
    await bank.landing.renew(generation)  # nothing of it can arrive any more: returns at once
    bank.start()
    await bank.there()
    bank.landing.arrivals.expect(b"m")
    await bank.write(b"m")
    assert await bank.landing.arrivals.wait(b"m")


async def test_channels_are_handed_over_also_when_the_rank_came_first() -> None:
    port, seen = BankPort(), []
    first, second = Pipe()
    port.put(first)
    port.listen(seen.append)
    port.put(second)
    assert seen == [first, second]


async def test_each_sender_is_offered_all_memory_and_gets_the_kind_it_can_write(bank: Bank) -> None:
    host = torch.zeros(256, dtype=torch.uint8)
    near = LocalLanding(Region(host.data_ptr(), 256, DRAM), bank=HOST_BANK)
    await near.open()
    receiver = NixlReceiver(b"f", (near, bank.landing), StreamReceiver(lambda *_: None))
    assert len(receiver.peers()) == 2
    assert receiver.memory_type == "stream"
    receiver.accepted(("VRAM",))
    assert receiver.memory_type == "stream"
    receiver.accepted(("VRAM", DRAM))
    assert receiver.memory_type == DRAM and bank.landing.bank == RANK_BANK
    await near.close()
