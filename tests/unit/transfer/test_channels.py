"""The channels of the fetcher: shared, few, and never in the way of who is back."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import grpc
import pytest

from chiasm.channel import backs_off
from chiasm.fakes import FakeEncoder, serving
from chiasm.plan import Source
from chiasm.tls import PeerTls
from chiasm.v1 import common_pb2, encoder_pb2_grpc
from decoder_svc.embeddings.channels import ChannelPool
from decoder_svc.embeddings.events import ItemLanded, PartLost
from tests.integration.cluster import free_port
from tests.unit.transfer.loopback import (
    Decoder,
    Encoder,
    bytes_of,
    decoder,
    encoder,
    media_plan,
)


async def test_channels_are_shared_and_the_longest_idle_are_closed() -> None:
    pool = ChannelPool(max_idle=1)
    async with pool.lease("a:1") as a, pool.lease("a:1") as again:
        assert a is again
        async with pool.lease("b:1") as b:
            pass
    async with pool.lease("b:1") as new_b:
        assert new_b is not b  # a was idle later
    await pool.close()


class Certificate:
    """Of PeerTls what channels need; `version` is changed by the test."""

    version = 1
    peer_name = "chiasm"

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials()


async def test_a_channel_of_an_older_certificate_is_leased_no_more() -> None:
    tls = Certificate()
    pool = ChannelPool(tls=cast("PeerTls", tls))
    async with pool.lease("a:1") as old:
        tls.version = 2
        async with pool.lease("a:1") as new:
            assert new is not old, "and the old one stays open for who has it"
        async with pool.lease("a:1") as again:
            assert again is new
    await pool.close()


async def test_a_leased_channel_works() -> None:
    pool = ChannelPool()
    async with serving(FakeEncoder()) as server, pool.lease(server.address) as channel:
        stub = encoder_pb2_grpc.EncoderStub(channel)
        assert (await stub.Describe(common_pb2.DescribeRequest())).role == "encoder"
    await pool.close()


async def lost(d: Decoder, source: Source) -> None:
    """A fetch that cannot be served, as its encoder is not there."""
    d.want("r", media_plan("lost"), [source])
    await d.until(lambda: bool(d.notices))
    assert isinstance(d.notices.pop(), PartLost)
    d.drop("r")
    await d.idle()


async def landed(d: Decoder, e: Encoder, *, epoch: int) -> None:
    plan = media_plan("landed")
    encode_id, call = await e.encode(plan)
    d.want("r", plan, [replace(e.source(encode_id), encoder_epoch=epoch)])
    assert await d.rows("r", plan.num_rows) == bytes_of(plan)
    assert d.notices.pop() == ItemLanded("r", 0)
    d.drop("r")
    call.cancel()
    await d.idle()


@pytest.mark.usefixtures("either", "hour_between_dials")
async def test_a_successor_at_the_same_address_is_fetched_from_at_once() -> None:
    port = free_port()
    async with decoder() as d:
        async with encoder(port=port) as first:
            await landed(d, first, epoch=first.epoch)
        await lost(d, first.source(b"gone"))
        await lost(d, first.source(b"gone"))  # by now the channel knows
        async with encoder(port=port) as second:
            assert second.epoch != first.epoch
            await landed(d, second, epoch=second.epoch)


@pytest.mark.usefixtures("either", "hour_between_dials")
async def test_an_encoder_that_could_not_be_reached_is_fetched_from_once_it_can() -> None:
    port = free_port()
    async with decoder() as d:
        await lost(d, Source(b"early", f"127.0.0.1:{port}", 0))
        async with encoder(port=port) as e:
            await landed(d, e, epoch=0)


@pytest.mark.usefixtures("hour_between_dials")
async def test_a_channel_that_would_not_dial_is_replaced_and_closed_by_its_last_user() -> None:
    pool, nobody = ChannelPool(), f"127.0.0.1:{free_port()}"
    async with pool.lease(nobody) as old:
        with pytest.raises(grpc.aio.AioRpcError, match="refused"):
            await encoder_pb2_grpc.EncoderStub(old).Describe(common_pb2.DescribeRequest())
        assert backs_off(old)
        async with pool.lease(nobody) as new:
            assert new is not old
        assert not is_closed(old)
        async with pool.lease(nobody) as again:
            assert again is new
    assert is_closed(old) and not is_closed(new)
    await pool.close()
    assert is_closed(new)


async def test_each_life_of_an_encoder_has_a_channel_of_its_own() -> None:
    pool = ChannelPool()
    async with pool.lease("a:1", 1) as first:
        async with pool.lease("a:1", 2) as second, pool.lease("b:1", 1):
            assert second is not first
        async with pool.lease("a:1", 1) as again:
            assert again is first
        assert is_closed(second), "it was idle, and another life is there"
    async with pool.lease("a:1", 3):
        assert is_closed(first)
    await pool.close()


def is_closed(channel: grpc.aio.Channel) -> bool:
    return channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
