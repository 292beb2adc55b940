"""A transport that writes into the decoder's memory by itself: fences, and writers that died."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from chiasm.plan import Span
from chiasm.transport.base import HOST_BANK, WriteFailed
from chiasm.transport.local import LocalMemory, LocalReceiver
from decoder_svc.embeddings.events import Broken, Fenced
from tests.unit.transfer.loopback import (
    PAGE_ROWS,
    bytes_of,
    decoder,
    encoder,
    media_plan,
)


async def test_rows_may_be_written_straight_into_memory() -> None:
    """A one-sided transport needs no change in servicer, session, receiver or fetcher."""
    memory = LocalMemory()

    def open_receiver(slab):
        name = memory.register(slab.view())
        return lambda _: LocalReceiver(name)

    async with encoder(outbound=memory) as e, decoder(open_receiver=open_receiver) as d:
        plan = media_plan("a")
        encode_id, _ = await e.encode(plan)
        d.want("r", plan, [e.source(encode_id)], until=PAGE_ROWS)
        await d.until(lambda: d.receiver.landed_until("r", 0, 0) == PAGE_ROWS)
        d.demands = [replace(d.demands[0], rows=Span(0, 50))]
        d.step()
        assert await d.rows("r", 50) == bytes_of(plan)
        d.drop("r")
        await d.idle()


async def test_a_write_that_fails_after_its_notification_leaves_no_fetch_open() -> None:
    """The encoder takes the rows for unwritten, and would wait for another grant of them."""
    memory = LocalMemory()
    receivers: list[LocalReceiver] = []

    class Doubting:
        def __init__(self, inner) -> None:
            self._inner = inner

        async def write(self, segment, *, seq, destinations, **kwargs) -> int:
            await self._inner.write(segment, seq=seq, destinations=destinations, **kwargs)
            if destinations[-1].rows.end == 50:
                receivers[0].on_arrived(seq, HOST_BANK)
                raise WriteFailed("seen too late", aborted=False)
            return 0

    class DoubtingOutbound:
        reach = memory.reach

        def open(self, *args) -> Doubting:
            return Doubting(memory.open(*args))

    def open_receiver(slab):
        name = memory.register(slab.view())

        def opened(_):
            receivers.append(LocalReceiver(name))
            return receivers[-1]

        return opened

    async with encoder(outbound=DoubtingOutbound()) as e, decoder(open_receiver=open_receiver) as d:
        plan = media_plan("a")
        encode_id, _ = await e.encode(plan)
        d.want("r", plan, [e.source(encode_id)])
        assert await d.rows("r", 50) == bytes_of(plan)
        await d.until(lambda: d.fetcher.num_open == 0)


class PostedSender:
    """A sender whose writes, once posted, cannot be called back: they end when `gate` opens."""

    def __init__(self, inner, gate: asyncio.Event, posted: asyncio.Event) -> None:
        self._inner = inner
        self._gate = gate
        self._posted = posted

    async def write(self, segment, **kwargs) -> int:
        async def posted() -> int:
            self._posted.set()
            await self._gate.wait()
            return await self._inner.write(segment, **kwargs)

        task = asyncio.create_task(posted())
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                continue  # the promise of `Sender.write`: it ends after the last write
        return task.result()


class PostedOutbound:
    """Makes them."""

    def __init__(self, inner: LocalMemory, gate: asyncio.Event) -> None:
        self._inner = inner
        self._gate = gate
        self.reach = inner.reach
        self.posted = asyncio.Event()

    def open(self, send, fetch_id, peers) -> PostedSender:
        return PostedSender(self._inner.open(send, fetch_id, peers), self._gate, self.posted)


async def test_a_broken_one_sided_fetch_is_fenced_before_its_pages_are_free() -> None:
    memory = LocalMemory()
    gate = asyncio.Event()

    def open_receiver(slab):
        name = memory.register(slab.view())
        return lambda _: LocalReceiver(name)

    outbound = PostedOutbound(memory, gate)
    async with encoder(outbound=outbound) as e, decoder(open_receiver=open_receiver) as d:
        plan = media_plan("a")
        encode_id, _call = await e.encode(plan)
        d.want("r", plan, [e.source(encode_id)])
        await outbound.posted.wait()
        for call in tuple(d.fetcher._calls.values()):
            call.break_off()
        await d.until(lambda: any(isinstance(event, Broken) for event in d.events))
        d.drop("r")
        held = 16 - d.receiver.num_free_pages
        await asyncio.sleep(0.2)
        assert held and 16 - d.receiver.num_free_pages == held
        assert e.servicer.fetches.num_open == 1  # the write is still posted
        gate.set()
        await d.until(lambda: any(isinstance(event, Fenced) for event in d.events))
        await d.idle()
        assert e.servicer.fetches.num_open == 0
        e.servicer.fetches.check()


async def test_a_one_sided_writer_that_died_is_given_up_after_a_while() -> None:
    memory = LocalMemory()
    gate = asyncio.Event()

    def open_receiver(slab):
        name = memory.register(slab.view())
        return lambda _: LocalReceiver(name)

    outbound = PostedOutbound(memory, gate)
    async with decoder(open_receiver=open_receiver) as d:
        async with encoder(outbound=outbound) as e:
            plan = media_plan("a")
            encode_id, _call = await e.encode(plan)
            d.want("r", plan, [e.source(encode_id)])
            await outbound.posted.wait()
        await d.until(lambda: any(isinstance(event, Broken) for event in d.events))
        (broken,) = (at for at, event in enumerate(d.events) if isinstance(event, Broken))
        assert d.free_pages[broken] < 16
        await d.idle()
        gate.set()
