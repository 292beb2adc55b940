"""Server-side request forgery, spelling by spelling: a canary on loopback is never asked.

The canary listens on IPv4 and IPv6 loopback. A control shows that it would notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest

from chiasm.config.gateway import MediaConfig
from chiasm.errors import InvalidMedia
from chiasm.plan import Modality
from gateway.media.fetch import MediaFetcher
from gateway.media.guard import CANNOT_FETCH, HostGuard
from gateway.messages import MediaPart

PUBLIC = "93.184.216.34"  # stands for a public host; nothing is ever sent to it here
HOSTS = [
    # IPv4 loopback, as people write it and as resolvers take it.
    "127.0.0.1", "127.0.0.2", "127.1", "127.0.1", "127.255.255.254", "127.0.0.1.", "2130706433",
    "017700000001", "0x7f000001", "0X7F000001", "0x7f.1", "0x7f.0.0.1", "0177.0.0.1", "0177.1",
    "0177.0x0.0.1", "127.0.0.01", "127.0.0.0x1", "00000177.0.0.1", "127.00.00.01", "0", "0.0.0.0",
    "0x0", "00", "4294967295", "2130706433.", "%31%32%37.0.0.1", "127%2e0%2e0%2e1",
    # Digits that are not ASCII, and dots that are not dots.
    "\u2460\u2461\u2466.0.0.1", "\uff11\uff12\uff17.0.0.1", "127\u30020\u30020\u30021",
    "127\uff0e0\uff0e0\uff0e1", "127.0.0.\u0661", "\u24ff.0.0.0",
    # Names.
    "localhost", "LOCALHOST", "localhost.", "LocalHost", "loc%61lhost", "\u24db\u24de\u24d2alhost",
    "localhost.localdomain", "ip6-localhost", "foo.localhost",
    # IPv6, plain and with an IPv4 address inside.
    "[::1]", "[0:0:0:0:0:0:0:1]", "[0000::0001]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]",
    "[::FFFF:127.0.0.1]", "[0:0:0:0:0:ffff:127.0.0.1]", "[::127.0.0.1]", "[64:ff9b::127.0.0.1]",
    "[64:ff9b::7f00:1]", "[64:ff9b:1::7f00:1]", "[2002:7f00:1::]", "[2002:7f00:1::1]",
    "[::1%25lo]", "[fe80::1]", "[fe80::1%25lo]", "[fc00::1]", "[fd00:ec2::254]", "[fec0::1]",
    "[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]", "[ff02::1]", "[::ffff:0:127.0.0.1]",
    # Metadata and private networks.
    "169.254.169.254", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518",
    "10.0.0.1", "172.16.0.1", "192.168.0.1", "100.64.0.1", "198.18.0.1", "192.0.0.192",
    "metadata.google.internal",
]  # fmt: skip
WHOLE = [
    "http://{host}\\@example.org/",
    "http://example.org@{host}/",
    "http://user:pass@{host}/",
    "http:\\\\{host}/",
    "http:/{host}/",
    "http:{host}/",
    "//{host}/",
    " http://{host}/",
    "\thttp://{host}/",
    "h\ttp://{host}/",
    "http://{host}\t/",
    "http://{host}\r\nhost: example.org/",
    "http://{host}#@example.org/",
    "http://{host}?@example.org/",
    "http://[{host}]/",
    "https://{host}/",
    "HTTP://{host}/",
    "url:http://{host}/",
    "file://{host}/etc/passwd",
    "file:///proc/self/environ",
    "gopher://{host}/_GET%20/",
    "ftp://{host}/",
    "dict://{host}/info",
    "ws://{host}/",
    "jar:http://{host}!/",
    "unix:///var/run/docker.sock",
    "http+unix://%2Fvar%2Frun%2Fdocker.sock/info",
    "javascript:fetch('http://{host}/')",
]


@dataclass
class Canary:
    """Counts connections, whatever is said on them."""

    port: int = 0
    hits: list[str] = field(default_factory=list)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.hits.append(str(writer.get_extra_info("sockname")))
        with contextlib.suppress(ConnectionError):
            await reader.readline()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()


@pytest.fixture
async def canary() -> AsyncIterator[Canary]:
    found = Canary()
    async with contextlib.AsyncExitStack() as stack:
        for host in ("127.0.0.1", "::1"):
            with contextlib.suppress(OSError):  # a machine without IPv6
                server = await asyncio.start_server(found.answer, host, found.port)
                found.port = server.sockets[0].getsockname()[1]
                stack.push_async_callback(server.wait_closed)
                stack.callback(server.close)
        yield found


async def fetch(url: str, guard: HostGuard | None = None, **config: object) -> bytes:
    limits = {"fetch_timeout_s": 2.0, "connect_timeout_s": 1.0, **config}
    settings = MediaConfig(**limits)  # type: ignore[arg-type]
    fetcher = MediaFetcher(settings, guard=guard)
    try:
        return await fetcher.fetch(
            MediaPart(Modality.IMAGE, url=url, param="p"), reserve=lambda _: None
        )
    finally:
        await fetcher.close()


def spellings(port: int) -> list[str]:
    urls = [f"http://{host}:{port}/x.png" for host in HOSTS]
    urls += [url.format(host=f"127.0.0.1:{port}") for url in WHOLE]
    return urls


def test_there_are_many() -> None:
    assert len(set(spellings(1))) >= 100


async def test_the_canary_would_notice(canary: Canary) -> None:
    patient = {"fetch_timeout_s": 60.0, "connect_timeout_s": 60.0}
    await fetch(f"http://127.0.0.1:{canary.port}/", allow_private_media=True, **patient)
    assert len(canary.hits) == 1


async def test_no_spelling_reaches_the_canary(canary: Canary) -> None:
    """All are refused, and none takes a connection's time: nothing was tried."""
    for url in spellings(canary.port):
        with pytest.raises(InvalidMedia) as refused:
            await fetch(url)
        assert refused.value.param == "p", url
    assert canary.hits == []


async def test_no_spelling_reaches_the_canary_by_a_name_that_is_allowed(canary: Canary) -> None:
    """The policy for names does not replace the one for addresses."""
    for address in (
        "127.0.0.1",
        "::1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "fe80::1%lo",
        "0.0.0.0",
    ):
        guard = HostGuard((".example.org",), lookup=answers([address]))
        with pytest.raises(InvalidMedia, match=CANNOT_FETCH):
            await fetch(f"http://pictures.example.org:{canary.port}/", guard)
    assert canary.hits == []


def answers(*rounds: Sequence[str]) -> Resolver:
    return Resolver(list(rounds))


@dataclass
class Resolver:
    """A name server whose answer may change from one question to the next."""

    rounds: list[Sequence[str]]
    asked: int = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        found = self.rounds[min(self.asked, len(self.rounds) - 1)]
        self.asked += 1
        if not found:
            raise socket.gaierror("no such name")
        return found


@pytest.mark.parametrize(
    "rounds",
    [
        [[PUBLIC], ["127.0.0.1"]],
        [[PUBLIC], [PUBLIC], ["127.0.0.1"]],
        [["127.0.0.1"], [PUBLIC]],
        [[PUBLIC, "127.0.0.1"]],
        [["127.0.0.1", PUBLIC]],
        [[PUBLIC, "::1"]],
        [[], ["127.0.0.1"]],
    ],
)
async def test_a_name_whose_addresses_change_is_dialled_where_it_was_checked(
    canary: Canary, monkeypatch: pytest.MonkeyPatch, rounds: list[list[str]]
) -> None:
    """Whatever is dialled was checked in the same breath; nobody asks the name server again."""
    dialled: list[str] = []
    loop = asyncio.get_running_loop()
    connect = type(loop).sock_connect

    async def sock_connect(self: object, sock: socket.socket, address: tuple[str, int]) -> None:
        dialled.append(address[0])
        if address[0] == PUBLIC:
            raise OSError("nothing is sent to the internet from here")
        await connect(self, sock, address)  # type: ignore[arg-type]

    monkeypatch.setattr(type(loop), "sock_connect", sock_connect)
    resolver = answers(*rounds)
    for _ in range(4):  # the changes come at whatever moment
        with pytest.raises(InvalidMedia, match=CANNOT_FETCH):
            await fetch(f"http://rebind.example:{canary.port}/", HostGuard(lookup=resolver))
    assert canary.hits == []
    assert set(dialled) <= {PUBLIC}
    assert resolver.asked == 4  # once for each dial: a second answer would be another address
