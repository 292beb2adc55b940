"""Keeps every peer described, verified and watched, and the two routers supplied with them.

A peer is used only while its WatchLoad stream is alive: the stream is the lease. When it breaks, or
falls silent, the peer is described again, with back-off, for ever; another epoch is another
process. A peer that does not answer even then is given up: its open calls fail, and move.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import aclosing
from dataclasses import dataclass, replace

import grpc

from chiasm import handshake
from chiasm.channel import backs_off, connect
from chiasm.errors import ChiasmError, ContractMismatch, Unavailable
from chiasm.rows import RowFormat
from chiasm.tls import PeerTls
from chiasm.v1 import common_pb2
from gateway.clients import DecoderClient, EncoderClient
from gateway.discovery.base import Discovery, Peer, PeerRole
from gateway.messages import Readiness
from gateway.routing import DecoderRouter, EncoderRouter, Endpoint
from gateway.routing.base import Advice

logger = logging.getLogger(__name__)

_DESCRIBE_S = 5.0
_SILENT_S = 4.0  # without a line of load
_RETIRED_S = 600.0  # open calls of a peer that is listed no more may go on for so long
_RENEWED_S = 5.0  # for calls about to be made on a channel whose certificate is old
_LOAD_INTERVAL_MS = 500
_FIRST_RETRY_S = 0.2
_MAX_RETRY_S = 3.0


@dataclass(slots=True)
class _Member:
    """One peer: its channel, the task that keeps it, and whom it was found through."""

    peer: Peer
    channel: grpc.aio.Channel
    client: EncoderClient | DecoderClient
    version: int  # of our certificate, as the channel shows it
    parent: Peer | None
    task: asyncio.Task[None] | None = None
    trouble: str = "not yet described"


class Fleet:
    """Owns the channels to all peers.

    Args:
        discovery: Where addresses come from.
        expected: What a peer must match to be used.
        tls: What peers are dialled with.
    """

    def __init__(
        self,
        discovery: Discovery,
        expected: handshake.Expected,
        tls: PeerTls | None = None,
    ) -> None:
        self.encoders = EncoderRouter()
        self.decoders = DecoderRouter()
        self._discovery = discovery
        self._expected = expected
        self._tls = tls
        self._members: dict[Peer, _Member] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._retired: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def num_encoders(self) -> int:
        """Encoder workers that may be used."""
        return len(self.encoders.endpoints)

    def start(self) -> None:
        """Begins to look for peers; returns at once."""
        self._watcher = asyncio.create_task(self._watch(), name="discovery")

    async def close(self) -> None:
        """Stops watching and closes every channel."""
        self._closing = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await asyncio.gather(*(self._drop(peer) for peer in tuple(self._members)))
        for task in self._retired:
            task.cancel()
        await asyncio.gather(*self._retired, return_exceptions=True)

    def encoder(self, address: str) -> EncoderClient:
        """The client of an encoder. Raises Unavailable when it has just gone."""
        client = self._client(Peer(PeerRole.ENCODER, address))
        assert isinstance(client, EncoderClient)
        return client

    def decoder(self, address: str) -> DecoderClient:
        """The client of a decoder. Raises Unavailable when it has just gone."""
        client = self._client(Peer(PeerRole.DECODER, address))
        assert isinstance(client, DecoderClient)
        return client

    def readiness(self) -> Readiness:
        """Text needs a decoder; media need an encoder whose rows a decoder takes."""
        decoders = self.decoders.taking
        images = any(e.fits(d) for e in self.encoders.endpoints for d in decoders)
        endpoints = tuple(
            {
                "role": member.peer.role.value,
                "address": member.peer.address,
                "ready": not member.trouble,
                "trouble": member.trouble,
            }
            for member in self._members.values()
        )
        return Readiness(bool(decoders), images, endpoints)

    def _client(self, peer: Peer) -> EncoderClient | DecoderClient:
        member = self._members.get(peer)
        if member is None:
            raise Unavailable(f"{peer.role} {peer.address} has gone")
        return member.client

    async def _watch(self) -> None:
        async for peers in self._discovery.watch():
            await self._reconcile(None, peers)

    async def _reconcile(self, parent: Peer | None, wanted: frozenset[Peer]) -> None:
        """Makes the members found through `parent` equal to `wanted`."""
        for peer in wanted:
            if peer not in self._members:
                member = self._members[peer] = _Member(peer, *self._dial(peer), parent)
                member.task = asyncio.create_task(self._keep(member), name=f"keep {peer.address}")
        gone = [p for p, m in self._members.items() if m.parent == parent and p not in wanted]
        for peer in gone:
            await self._drop(peer)

    def _dial(self, peer: Peer) -> tuple[grpc.aio.Channel, EncoderClient | DecoderClient, int]:
        version = self._version
        channel = connect(peer.address, self._tls)
        encoder = peer.role is PeerRole.ENCODER
        return channel, EncoderClient(channel) if encoder else DecoderClient(channel), version

    @property
    def _version(self) -> int:
        return self._tls.version if self._tls else 0

    def _renew(self, member: _Member) -> None:
        """Dials anew if our certificate has been replaced, open calls end on the old channel; or if
        the channel would not: our own pauses between two tries are pause enough."""
        if member.version == self._version and not backs_off(member.channel):
            return
        old = replace(member)
        member.channel, member.client, member.version = self._dial(member.peer)
        self._retire(old, _RENEWED_S)

    def _retire(self, member: _Member, at_least_s: float = 0.0) -> None:
        retired = asyncio.create_task(_close_once_idle(member, at_least_s))
        self._retired.add(retired)
        retired.add_done_callback(self._retired.discard)

    async def _drop(self, peer: Peer) -> None:
        member = self._members.pop(peer, None)
        if member is None:
            return
        if member.task is not None:
            member.task.cancel()
            await asyncio.gather(member.task, return_exceptions=True)
        self._leave(peer)
        for child in [p for p, m in self._members.items() if m.parent == peer]:
            await self._drop(child)
        if self._closing or not len(member.client.streams):
            await member.client.close()
            await member.channel.close(None)
            return
        self._retire(member)

    async def _keep(self, member: _Member) -> None:
        """Describe, verify, watch; again and again."""
        retry_s = _FIRST_RETRY_S
        while True:
            described = False
            self._renew(member)
            try:
                description = await member.client.describe(timeout_s=_DESCRIBE_S)
                await self._admit(member, description)
                described = True
                retry_s = _FIRST_RETRY_S
                await self._watch_load(member)
                # A stream that ends in peace says: describe me again, my workers have changed.
                await asyncio.sleep(_FIRST_RETRY_S)
                continue
            except ChiasmError as error:
                self._trouble(member, error.message)
                if isinstance(error, ContractMismatch):
                    retry_s = _MAX_RETRY_S
            self._router(member.peer).lost(member.peer.address)
            if not described:
                what = f"{member.peer.role} {member.peer.address} does not answer"
                member.client.streams.give_up(Unavailable(what))
            await asyncio.sleep(retry_s * random.uniform(0.8, 1.2))
            retry_s = min(_MAX_RETRY_S, retry_s * 2)

    async def _watch_load(self, member: _Member) -> None:
        """Until the stream ends in peace, or our certificate is replaced.

        Raises ChiasmError when it breaks or falls silent.
        """
        async with aclosing(member.client.watch_load(interval_ms=_LOAD_INTERVAL_MS)) as loads:
            while True:
                try:
                    async with asyncio.timeout(_SILENT_S):
                        load = await anext(loads, None)
                except TimeoutError:
                    raise Unavailable(f"silent for {_SILENT_S:g} s") from None
                if load is None or member.version != self._version:
                    return
                self._advise(member.peer, load)
                if load.stalled and self.decoders.has_another(member.peer.address):
                    # Its requests would wait until all ranks have loaded again: they move.
                    member.client.streams.give_up(Unavailable("the decoder has lost its ranks"))

    async def _admit(self, member: _Member, description: common_pb2.Description) -> None:
        """Verifies a description and gives the peer, or the workers behind it, to the router."""
        check = (
            handshake.check_encoder
            if member.peer.role is PeerRole.ENCODER
            else handshake.check_decoder
        )
        check(description, self._expected)
        workers = frozenset(Peer(member.peer.role, w.address) for w in description.workers)
        await self._reconcile(member.peer, workers - {member.peer})
        if not workers or member.peer in workers:
            self._router(member.peer).join(_endpoint(member.peer.address, description))
        if member.trouble:
            logger.info("%s %s: ready", member.peer.role, member.peer.address)
        member.trouble = ""

    def _trouble(self, member: _Member, what: str) -> None:
        if what != member.trouble:
            logger.warning("%s %s: %s", member.peer.role, member.peer.address, what)
        member.trouble = what

    def _router(self, peer: Peer) -> EncoderRouter | DecoderRouter:
        return self.encoders if peer.role is PeerRole.ENCODER else self.decoders

    def _leave(self, peer: Peer) -> None:
        self._router(peer).leave(peer.address)

    def _advise(self, peer: Peer, load: common_pb2.Load) -> None:
        encoder = peer.role is PeerRole.ENCODER
        backlog = load.pending_patches if encoder else load.waiting_tokens
        advice = Advice(backlog, load.kv_usage_ratio, load.draining)
        self._router(peer).advise(peer.address, advice)


async def _close_once_idle(member: _Member, at_least_s: float) -> None:
    """Closes the channel once its calls have ended: a pod leaves its name before it has drained."""
    try:
        await asyncio.sleep(at_least_s)  # calls that are about to be made
        async with asyncio.timeout(_RETIRED_S):
            while len(member.client.streams):
                await asyncio.sleep(_FIRST_RETRY_S)
    except TimeoutError:
        logger.warning("%s %s: cut off", member.peer.role, member.peer.address)
    finally:
        member.client.streams.give_up(Unavailable("the peer has gone"))
        await member.client.close()
        await member.channel.close(None)


def _endpoint(address: str, description: common_pb2.Description) -> Endpoint:
    """Raises ContractMismatch for a row format this build does not know."""
    try:
        rows = RowFormat.from_proto(description.rows)
    except ValueError as error:
        raise ContractMismatch(f"{address}: {error}") from None
    return Endpoint(
        address=address,
        advertised=description.advertised_address or address,
        instance_id=description.instance_id,
        epoch=description.epoch,
        rows=rows,
        tower=description.digests.tower,
        max_model_len=description.max_model_len,
        language_model=description.digests.language_model,
        max_item_patches=description.max_item_patches,
        features=frozenset(description.features),
    )
