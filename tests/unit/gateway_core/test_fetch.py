"""Fetching under attack: a canary listens on loopback and must never be hit."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import pytest
from aiohttp import web

from chiasm.config.gateway import MediaConfig
from chiasm.errors import InvalidMedia, ResourceExhausted, TooLarge
from chiasm.plan import Modality
from gateway.media.fetch import MediaFetcher
from gateway.media.guard import CANNOT_FETCH, HostGuard, is_public, parse_literal
from gateway.messages import MediaPart
from tests.unit.gateway_core.conftest import png

RED = png()


@dataclass
class Site:
    """A web server on loopback that counts every connection."""

    port: int = 0
    hits: list[str] = field(default_factory=list)
    location: str = ""

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    found = Site()

    async def answer(request: web.Request) -> web.StreamResponse:
        found.hits.append(request.path)
        if request.path == "/redirect":
            raise web.HTTPFound(found.location)
        if request.path == "/loop":
            raise web.HTTPFound("/loop")
        if request.path == "/endless":
            response = web.StreamResponse()
            await response.prepare(request)
            with_limit = 1000
            for _ in range(with_limit):
                await response.write(bytes(65536))
            return response
        if request.path == "/slow":
            await asyncio.sleep(5)
        if request.path == "/missing":
            raise web.HTTPNotFound
        if request.path == "/echo":
            return web.Response(body=repr(dict(request.headers)).encode())
        return web.Response(body=RED, content_type="text/html")

    application = web.Application()
    application.router.add_get("/{tail:.*}", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    listener = web.TCPSite(runner, "127.0.0.1", 0)
    await listener.start()
    found.port = runner.addresses[0][1]
    try:
        yield found
    finally:
        await runner.cleanup()


@pytest.fixture
async def canary() -> AsyncIterator[Site]:
    async with site() as found:
        yield found


async def get(
    url: str,
    config: MediaConfig | None = None,
    guard: HostGuard | None = None,
    reserve: Callable[[int], None] = lambda _: None,
) -> bytes:
    fetcher = MediaFetcher(config or MediaConfig(), guard=guard)
    try:
        return await fetcher.fetch(MediaPart(Modality.IMAGE, url=url, param="p"), reserve)
    finally:
        await fetcher.close()


OPEN = MediaConfig(allow_private_media=True)


async def test_fetches(canary: Site) -> None:
    assert await get(f"{canary.root}/x.png", OPEN) == RED
    canary.location = "/y.png"
    assert await get(f"{canary.root}/redirect", OPEN) == RED
    echo = await get(f"{canary.root}/echo", OPEN)
    assert b"Cookie" not in echo and b"Authorization" not in echo


LOOPBACK_SPELLINGS = [
    "http://127.0.0.1:{port}/",
    "http://localhost:{port}/",
    "http://2130706433:{port}/",
    "http://0x7f000001:{port}/",
    "http://0x7f.1:{port}/",
    "http://0177.0.0.1:{port}/",
    "http://127.1:{port}/",
    "http://127.0.0.1.:{port}/",
    "http://[::1]:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/",
    "http://[::ffff:7f00:1]:{port}/",
    "http://[::127.0.0.1]:{port}/",
    "http://0:{port}/",
    "http://0.0.0.0:{port}/",
    "http://[::]:{port}/",
    "http://127.0.0.1:{port}\\@example.org/",
    "http://\u2460\u2461\u2466.0.0.1:{port}/",
    "http://user@127.0.0.1:{port}/",
]


@pytest.mark.parametrize("spelling", LOOPBACK_SPELLINGS)
async def test_private_targets_are_never_dialled(canary: Site, spelling: str) -> None:
    with pytest.raises(InvalidMedia) as failure:
        await get(spelling.format(port=canary.port))
    assert failure.value.param == "p"
    assert canary.hits == []


@pytest.mark.parametrize(
    "location",
    [
        *LOOPBACK_SPELLINGS,
        "//127.0.0.1:{port}/",
        "http://169.254.169.254/latest/meta-data/",
        "http://10.0.0.1/",
        "http://192.168.1.1/",
        "http://[fe80::1]/",
        "http://[64:ff9b::7f00:1]:{port}/",
        "http://[2002:7f00:1::]:{port}/",
        "file:///etc/passwd",
        "gopher://127.0.0.1:{port}/",
        "ftp://127.0.0.1:{port}/",
    ],
)
async def test_redirects_are_checked_like_the_first_hop(canary: Site, location: str) -> None:
    """The first hop is let through by name; the second must not be."""
    async with site() as first:
        first.location = location.format(port=canary.port)
        guard = PublicFront(first.port)
        with pytest.raises(InvalidMedia):
            await get(f"http://front.example:{first.port}/redirect", guard=guard)
        assert first.hits == ["/redirect"]
    assert canary.hits == []


class PublicFront(HostGuard):
    """Lets `front.example` stand on loopback, as if it were a public host."""

    def __init__(self, port: int) -> None:
        super().__init__(lookup=_no_lookup)
        self._port = port

    async def addresses(self, host: str, port: int):  # noqa: ANN201
        if host == "front.example" and port == self._port:
            return [ip_address("127.0.0.1")]
        return await super().addresses(host, port)


async def _no_lookup(host: str, port: int) -> Sequence[str]:
    raise socket.gaierror("no such name")


async def test_a_name_that_turns_private_is_checked_when_dialled(canary: Site) -> None:
    """Public at the first look, private at the second: every dial is preceded by its own check."""
    answers = [["93.184.216.34"], ["127.0.0.1"]]
    seen: list[str] = []

    async def lookup(host: str, port: int) -> Sequence[str]:
        seen.append(host)
        return answers[min(len(seen) - 1, 1)]

    guard = HostGuard(lookup=lookup)
    assert [str(a) for a in await guard.addresses("rebind.example", canary.port)] == answers[0]
    with pytest.raises(InvalidMedia, match=CANNOT_FETCH):
        await get(f"http://rebind.example:{canary.port}/", guard=guard)
    assert seen == ["rebind.example"] * 2
    assert canary.hits == []


async def test_one_private_address_among_public_ones_refuses_the_name(canary: Site) -> None:
    async def lookup(host: str, port: int) -> Sequence[str]:
        return ["93.184.216.34", "127.0.0.1"]

    with pytest.raises(InvalidMedia):
        await get(f"http://both.example:{canary.port}/", guard=HostGuard(lookup=lookup))
    assert canary.hits == []


async def test_refusals_do_not_say_whether_the_target_exists(canary: Site) -> None:
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))
    urls = {
        f"{canary.root}/": None,
        f"http://127.0.0.1:{closed.getsockname()[1]}/": None,
        "http://10.1.2.3/": None,
    }
    told = set()
    for url in urls:
        with pytest.raises(InvalidMedia) as failure:
            await get(url)
        told.add(failure.value.message)
    with pytest.raises(InvalidMedia) as failure:
        await get("http://none.example/", guard=HostGuard(lookup=_no_lookup))
    told.add(failure.value.message)
    closed.close()
    assert told == {CANNOT_FETCH}


async def test_domains(canary: Site) -> None:
    config = MediaConfig(allow_private_media=True, allowed_media_domains=("127.0.0.1", ".good.org"))
    assert await get(f"{canary.root}/", config) == RED
    guard = HostGuard(config.allowed_media_domains, allow_private=True, lookup=_no_lookup)
    for host in ("good.org", "a.good.org", "GOOD.org."):
        guard.check_url(f"http://{host}/", param="p")
    for host in ("evilgood.org", "good.org.evil", "127.0.0.2", "good.org@evil.org"):
        with pytest.raises(InvalidMedia):
            guard.check_url(f"http://{host}/", param="p")


async def test_limits_on_size_hops_and_time(canary: Site) -> None:
    with pytest.raises(TooLarge):
        small = MediaConfig(allow_private_media=True, max_image_bytes=10**6)
        await get(f"{canary.root}/endless", small)
    with pytest.raises(InvalidMedia, match="redirects"):
        await get(f"{canary.root}/loop", OPEN)
    assert canary.hits.count("/loop") == OPEN.max_redirects + 1
    with pytest.raises(InvalidMedia, match=CANNOT_FETCH):
        await get(f"{canary.root}/slow", MediaConfig(allow_private_media=True, fetch_timeout_s=0.2))
    with pytest.raises(InvalidMedia, match=CANNOT_FETCH):
        await get(f"{canary.root}/missing", OPEN)


async def test_bytes_are_reserved_while_they_stream(canary: Site) -> None:
    def full(num_bytes: int) -> None:
        raise ResourceExhausted("full")

    with pytest.raises(ResourceExhausted):
        await get(f"{canary.root}/x", OPEN, reserve=full)
    reserved: list[int] = []
    await get(f"{canary.root}/x", OPEN, reserve=reserved.append)
    assert sum(reserved) == len(RED)


async def test_proxies_of_the_environment_are_not_used(
    canary: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site() as proxy:
        monkeypatch.setenv("http_proxy", proxy.root)
        monkeypatch.setenv("HTTP_PROXY", proxy.root)
        assert await get(f"{canary.root}/x", OPEN) == RED
        assert proxy.hits == []


@pytest.mark.parametrize(
    "url", ["x.png", "iVBORw0KGgo=", "", "http://", "http:///x", "://", "http://[::1"]
)
async def test_what_is_no_url(url: str) -> None:
    with pytest.raises(InvalidMedia):
        await get(url)


async def test_files_only_below_the_root(tmp_path: Path) -> None:
    root = tmp_path / "media"
    root.mkdir()
    (root / "a b.png").write_bytes(RED)
    (tmp_path / "secret.png").write_bytes(RED)
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    config = MediaConfig(allowed_local_media_path=str(root))
    assert await get(f"file://{root}/a%20b.png", config) == RED
    assert await get(f"file://localhost{root}/a%20b.png", config) == RED
    for path in (
        f"{root}/../secret.png",
        f"{root}/link.png",
        f"{root}",
        "/etc/passwd",
        f"{root}/none.png",
        f"{root}/%2e%2e/secret.png",
        f"{root}/a%00.png",
    ):
        with pytest.raises(InvalidMedia, match=CANNOT_FETCH):
            await get(f"file://{path}", config)
    with pytest.raises(InvalidMedia):
        await get(f"file://host{root}/a%20b.png", config)
    with pytest.raises(InvalidMedia, match="not allowed"):
        await get(f"file://{root}/a%20b.png")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1",
        "0.0.0.0", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1",
        "::1", "::", "fe80::1", "fc00::1", "fd00::1", "ff02::1", "2001:db8::1",
        "::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a00:1", "64:ff9b::808:808",
        "64:ff9b:1::a00:1",
        "2002:a00:1::", "2002:7f00:1::1", "::10.0.0.1", "fec0::1", "2001:0:a00:1::1",
    ],
)  # fmt: skip
def test_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "2002:808:808::1"]
)
def test_public(address: str) -> None:
    assert is_public(ip_address(address))


def test_literals() -> None:
    for text in ("2130706433", "0x7f000001", "0177.0.0.1", "127.1", "127.0.0.1"):
        assert str(parse_literal(text)) == "127.0.0.1"
    for text in ("example.org", "cafe", "7f.example", "a1.b2.c"):
        assert parse_literal(text) is None
    for text in ("1.2.3.4.5", "999.1", "x.123"):
        with pytest.raises(OSError):
            parse_literal(text)
