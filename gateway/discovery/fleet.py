"""Keeps every peer described, verified and watched, and the two routers supplied with them.

A peer is used only while its WatchLoad stream is alive: the stream is the lease. When it breaks the
peer is described again, with back-off, for ever; another epoch is another process.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass

import grpc

from chiasm import handshake
from chiasm.channel import connect
from chiasm.errors import ChiasmError, ContractMismatch, Unavailable
from chiasm.rows import RowFormat
from chiasm.v1 import common_pb2
from gateway.clients import DecoderClient, EncoderClient
from gateway.discovery.base import Discovery, Peer, PeerRole
from gateway.messages import Readiness
from gateway.routing import DecoderRouter, EncoderRouter, Endpoint
from gateway.routing.base import Advice

logger = logging.getLogger(__name__)

_DESCRIBE_S = 5.0
_LOAD_INTERVAL_MS = 500
_FIRST_RETRY_S = 0.2
_MAX_RETRY_S = 3.0


@dataclass(slots=True)
class _Member:
    """One peer: its channel, the task that keeps it, and whom it was found through."""

    peer: Peer
    channel: grpc.aio.Channel
    client: EncoderClient | DecoderClient
    parent: Peer | None
    task: asyncio.Task[None] | None = None
    trouble: str = "not yet described"


class Fleet:
    """Owns the channels to all peers.

    Args:
        discovery: Where addresses come from.
        expected: What a peer must match to be used.
    """

    def __init__(self, discovery: Discovery, expected: handshake.Expected) -> None:
        self.encoders = EncoderRouter()
        self.decoders = DecoderRouter()
        self._discovery = discovery
        self._expected = expected
        self._members: dict[Peer, _Member] = {}
        self._watcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to look for peers; returns at once."""
        self._watcher = asyncio.create_task(self._watch(), name="discovery")

    async def close(self) -> None:
        """Stops watching and closes every channel."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await asyncio.gather(*(self._drop(peer) for peer in tuple(self._members)))

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
        decoders = self.decoders.endpoints
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
                channel = connect(peer.address)
                encoder = peer.role is PeerRole.ENCODER
                client = EncoderClient(channel) if encoder else DecoderClient(channel)
                member = _Member(peer, channel, client, parent)
                self._members[peer] = member
                member.task = asyncio.create_task(self._keep(member), name=f"keep {peer.address}")
        gone = [p for p, m in self._members.items() if m.parent == parent and p not in wanted]
        for peer in gone:
            await self._drop(peer)

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
        await member.channel.close(None)

    async def _keep(self, member: _Member) -> None:
        """Describe, verify, watch; again and again."""
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                description = await member.client.describe(timeout_s=_DESCRIBE_S)
                await self._admit(member, description)
                retry_s = _FIRST_RETRY_S
                async for load in member.client.watch_load(interval_ms=_LOAD_INTERVAL_MS):
                    self._advise(member.peer, load)
                # A stream that ends in peace says: describe me again, my workers have changed.
                await asyncio.sleep(_FIRST_RETRY_S)
                continue
            except ChiasmError as error:
                self._trouble(member, error.message)
                if isinstance(error, ContractMismatch):
                    retry_s = _MAX_RETRY_S
            self._leave(member.peer)
            await asyncio.sleep(retry_s * random.uniform(0.8, 1.2))
            retry_s = min(_MAX_RETRY_S, retry_s * 2)

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
    )
