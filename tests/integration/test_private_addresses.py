"""By default a gateway dials no private address, directly or by redirect (a canary counts hits)."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.integration.stack import Service, Stack


@pytest.fixture(scope="module")
def guarded(stack: Stack) -> Iterator[Service]:
    """A second gateway over the same services, with the default media policy."""
    flags: list[str] = []
    for service in stack.services:
        if service.name == "encoder_svc":
            flags += ["--encoder-urls", service.address]
        elif service.name == "decoder_svc":
            flags += ["--decoder-urls", service.address]
    other = Stack("demo")
    try:
        yield other.start("gateway", *flags).wait_in_use()
    finally:
        other.stop()


@pytest.fixture(scope="module")
def canary() -> Iterator[tuple[int, list[str]]]:
    """A listener that must never be asked."""
    hits: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hits.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port, hits
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "[::ffff:127.0.0.1]",
        "0.0.0.0",
        "169.254.169.254",
    ],
)
def test_no_private_address_is_dialled(
    guarded: Service, canary: tuple[int, list[str]], host: str
) -> None:
    port, hits = canary
    url = f"http://{host}/x.png" if host.startswith("169") else f"http://{host}:{port}/x.png"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    response = httpx.post(
        f"http://{guarded.address}/v1/chat/completions",
        json={"model": "demo", "messages": [{"role": "user", "content": content}]},
        timeout=180,
    )
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith("messages[0].content[0]")
    assert hits == []
