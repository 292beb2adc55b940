"""An encoder and a decoder without models, a process each, to be killed, stopped and restarted.

Every row carries a pattern that names its request. The parent plays the gateway: it says over a
pipe which item to fetch from where; the decoder answers when all rows have landed and are right.
"""

from __future__ import annotations

import asyncio
import os
import sys
from multiprocessing.connection import Connection

import torch

from chiasm.plan import Source, Span
from chiasm.transport.agent import TransferAgent
from chiasm.transport.nixl import NixlOutbound
from decoder_svc.embeddings.events import ItemLanded, PartLost
from encoder_svc.arena import RowArena
from tests.unit.transfer import loopback
from tests.unit.transfer.loopback import (
    PAGE_ROWS,
    Nixl,
    PatternEngine,
    Sides,
    bytes_of,
    media_plan,
)

ROWS, SEGMENT_ROWS, PAGES = 6000, 2000, 512


def run_encoder(port: int, tls: str, pipe: Connection) -> None:
    """Serves patterns until it is killed; first says its epoch."""
    _settle_in(tls)
    asyncio.run(_encoder(port, pipe))


async def _encoder(port: int, pipe: Connection) -> None:
    engine = PatternEngine(segment_rows=SEGMENT_ROWS)
    arena = RowArena(8 << 20, torch.device("cpu"))
    make = engine.make_buffer

    def kept(digest: bytes, rows: Span):  # type: ignore[no-untyped-def]
        data = bytearray(make(digest, rows).read(0, len(rows)))
        return arena.keep(torch.frombuffer(data, dtype=torch.uint8).view(len(rows), -1))

    engine.make_buffer = kept
    agent = TransferAgent((arena.region,))
    outbound = NixlOutbound(agent, arena.region.memory_type)
    limits = {"cache_bytes": 4 << 20, "fetch_grace_s": 20.0}
    async with loopback.encoder(engine, port=port, outbound=outbound, **limits) as encoder:
        pipe.send(encoder.epoch)
        store, fetches = encoder.servicer.store, encoder.servicer.fetches
        while True:
            if pipe.poll():
                pipe.recv()
                store.check()
                fetches.check()
                pipe.send((store.num_encodes, fetches.num_open, store.held_bytes))
            await asyncio.sleep(0.01)


def run_decoder(tls: str, pipe: Connection) -> None:
    """Fetches what it is told to until it is killed."""
    _settle_in(tls)
    Sides.nixl = Nixl()
    asyncio.run(_decoder(pipe))


async def _decoder(pipe: Connection) -> None:
    async with loopback.decoder(pages=PAGES) as decoder:
        pipe.send("ready")
        while True:
            while not pipe.poll():
                await asyncio.sleep(0.005)
            order = pipe.recv()
            if order[0] == "rest":
                await decoder.idle()
                decoder.receiver.check()
                pipe.send(("rest", decoder.landing.generation))
            else:
                pipe.send(await _fetch(decoder, *order[1:]))


async def _fetch(decoder: loopback.Decoder, name: str, source: Source, patience_s: float) -> str:
    """landed, lost and why (another encode is needed), or late; wrong rows end the process."""
    plan = media_plan(name, ROWS)
    decoder.notices.clear()
    window = 2 * PAGES * PAGE_ROWS // 3
    decoder.want(name, plan, [source], until=window)
    try:
        async with asyncio.timeout(patience_s):
            await decoder.until(lambda: _over(decoder, name, window))
    except TimeoutError:
        decoder.drop(name)
        return "late"
    lost = [n for n in decoder.notices if isinstance(n, PartLost)]
    landed = decoder.receiver.landed_until(name, 0, 0)
    _check(decoder, name, Span(0, landed), bytes_of(plan))
    whole = landed >= window or any(isinstance(n, ItemLanded) for n in decoder.notices)
    decoder.drop(name)
    return "landed" if whole and not lost else f"lost: {[n.message for n in lost]}"


def _over(decoder: loopback.Decoder, name: str, window: int) -> bool:
    return bool(decoder.notices) or decoder.receiver.landed_until(name, 0, 0) >= window


def _check(decoder: loopback.Decoder, name: str, rows: Span, wanted: bytes) -> None:
    view, size = decoder.slab.view(), loopback.ROW
    found = b"".join(
        bytes(view[run.first_slab_row * size : (run.first_slab_row + run.num_rows) * size])
        for run in decoder.receiver.locate(name, 0, rows)
    )
    if found != wanted[: len(found)]:
        print(f"wrong rows for {name}", file=sys.stderr, flush=True)
        os._exit(3)


def _settle_in(tls: str) -> None:
    torch.set_num_threads(1)
    if tls:
        os.environ["UCX_TLS"] = tls
