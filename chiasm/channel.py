"""Client channels: keepalive that servers of ours allow, message limits, typed errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import grpc

from chiasm.errors import from_rpc
from chiasm.tls import PeerTls

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A megabyte in a frame and on its way, not 16 kB: fewer wake-ups on both ends.
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # its own limit, else a minute, comes first
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

T_co = TypeVar("T_co", covariant=True)


class _Readable(Protocol[T_co]):
    async def read(self) -> T_co: ...


def connect(address: str, tls: PeerTls | None = None) -> grpc.aio.Channel:
    """A channel to `host:port`. Cheap; connects on first use.

    With TLS, the peer's certificate must hold the peers' name, whatever the address: pods are
    dialled by addresses that no certificate knows. A channel keeps the certificate it was made
    with: `tls.version` says when to make another.
    """
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    name = ("grpc.ssl_target_name_override", tls.peer_name)
    credentials = tls.channel_credentials()
    return grpc.aio.secure_channel(address, credentials, options=(*CHANNEL_OPTIONS, name))


def backs_off(channel: grpc.aio.Channel) -> bool:
    """Whether calls begun now fail without a dial: the last one failed, not long ago.

    gRPC pauses before it dials again, for longer each time. Who has news of the peer since then
    makes another channel: it dials at once.
    """
    return channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE


@contextmanager
def typed_errors() -> Iterator[None]:
    """Inside, a failed rpc raises the ChiasmError its server meant."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from error


async def messages(call: _Readable[T_co]) -> AsyncGenerator[T_co, None]:
    """Iterates a call's responses with typed errors.

    A cancelled call raises `asyncio.CancelledError`, as grpc does.
    """
    while True:
        try:  # as `typed_errors`, which takes a microsecond more of every message
            message = await call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from error
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            return
        yield message


async def close_quietly(call: grpc.aio.Call) -> None:
    """Cancels a call if it still runs and lets the event loop see the end of it."""
    if call.cancel():
        await asyncio.sleep(0)


def being_cancelled() -> bool:
    """Whether it is the running task that somebody cancels, and not what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
