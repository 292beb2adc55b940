"""The slab between processes, and the channels of the fetcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import cast

import grpc
import pytest

from chiasm.fakes import FakeEncoder, serving
from chiasm.tls import PeerTls
from chiasm.v1 import common_pb2, encoder_pb2_grpc
from decoder_svc.embeddings.channels import ChannelPool
from decoder_svc.embeddings.slab import Slab

ATTACH = """
import sys
from decoder_svc.embeddings.slab import Slab
with Slab(16, name=sys.argv[1]) as slab:
    assert bytes(slab.view()[:3]) == b"abc"
    slab.write(3, b"def")
"""


def test_another_process_sees_and_writes_the_same_bytes_and_leaves_them_alone() -> None:
    with Slab(16) as slab:
        slab.write(0, b"abc")
        subprocess.run(
            [sys.executable, "-c", ATTACH, slab.name],
            check=True,
            timeout=30,
            cwd=Path(__file__).parents[3],
        )
        assert bytes(slab.view()[:6]) == b"abcdef"
        assert Path("/dev/shm", slab.name).exists()
    assert not Path("/dev/shm", slab.name).exists()
    slab.close()  # idempotent
    with pytest.raises(FileNotFoundError):
        Slab(16, name=slab.name)


def test_no_byte_leaves_the_slab() -> None:
    with Slab(16) as slab:
        for offset, data in ((-1, b"x"), (15, b"xy"), (1 << 60, b"x")):
            with pytest.raises(ValueError, match="outside"):
                slab.write(offset, data)
        slab.write(15, b"x")
    with pytest.raises(ValueError, match="at least one byte"):
        Slab(0)


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


CREATE = """
import time
from decoder_svc.embeddings.slab import Slab
print(Slab(16).name, flush=True)
time.sleep(60)
"""


def test_what_a_killed_creator_left_is_removed_by_the_next_and_a_live_one_is_kept() -> None:
    creators = [
        subprocess.Popen([sys.executable, "-c", CREATE], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        paths = [
            Path("/dev/shm", creator.stdout.readline().strip())
            for creator in creators
            if creator.stdout is not None
        ]
        creators[0].kill()
        creators[0].wait()
        assert all(path.exists() for path in paths)
        with Slab(16):
            assert [path.exists() for path in paths] == [False, True]
    finally:
        for creator in creators:
            creator.kill()
            creator.communicate()
    with Slab(16):
        assert not any(path.exists() for path in paths)
