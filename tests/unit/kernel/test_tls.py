"""Certificates as files that change, and what a container's health check says."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from chiasm.config import TlsConfig
from chiasm.fakes import FakeEncoder, serving
from chiasm.metrics_port import serve_metrics
from chiasm.probe import is_live, is_well
from chiasm.server import Server
from chiasm.tls import PeerTls, peer_tls
from tests.integration.certificates import NAME, Authority, Identity


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ca")


def config_of(identity: Identity) -> TlsConfig:
    return TlsConfig(
        tls_cert_file=str(identity.certificate),
        tls_key_file=str(identity.key),
        tls_ca_file=str(identity.ca),
    )


def test_without_files_there_is_no_tls_and_with_some_of_them_an_error(authority: Authority) -> None:
    assert peer_tls(TlsConfig()) is None
    whole = config_of(authority.issue("some"))
    assert isinstance(peer_tls(whole), PeerTls)
    for name in ("tls_cert_file", "tls_key_file", "tls_ca_file", "tls_peer_name"):
        with pytest.raises(ValueError, match="go together"):
            peer_tls(replace(whole, **{name: ""}))


def test_files_that_are_no_pair_are_refused_at_the_start(
    authority: Authority, tmp_path: Path
) -> None:
    one, other = config_of(authority.issue("one")), config_of(authority.issue("other"))
    with pytest.raises(ValueError, match="no certificate, its key and a CA"):
        peer_tls(replace(one, tls_key_file=other.tls_key_file))
    with pytest.raises(ValueError, match="no certificate, its key and a CA"):
        peer_tls(replace(one, tls_ca_file=str(tmp_path / "none")))


def test_a_pair_that_is_being_written_leaves_the_one_before(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    used, fresh = authority.issue("used"), authority.issue("fresh")
    tls = PeerTls(config_of(used))
    assert tls.version == 1
    with caplog.at_level(logging.INFO):
        used.certificate.write_bytes(fresh.certificate.read_bytes())
        assert [tls.version, tls.version] == [1, 1]
        tls.channel_credentials(), tls.server_credentials()
        assert len(caplog.records) == 1, "it is said once"
        used.key.write_bytes(fresh.key.read_bytes())
        assert [tls.version, tls.version] == [2, 2]
        used.ca.unlink()
        assert [tls.version, tls.version] == [2, 2]
    assert len(caplog.records) == 3
    assert "a new certificate is in use" in caplog.text


async def test_a_container_is_well_while_its_service_lives() -> None:
    async with serving(FakeEncoder()) as server:
        port = str(server.port)
        assert await asyncio.to_thread(is_live, "encoder", {"CHIASM_PORT": port})
        await server.live(False)
        assert not await asyncio.to_thread(is_live, "encoder", {"CHIASM_PORT": port})
    for role in ("encoder", "gateway"):
        assert not await asyncio.to_thread(is_live, role, {"CHIASM_PORT": port})


@pytest.fixture(autouse=True)
def patient_(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy elsewhere is no answer of its own."""
    monkeypatch.setattr("chiasm.probe._TIMEOUT_S", 100.0)


async def test_a_service_that_only_peers_get_through_to_is_well_too(authority: Authority) -> None:
    """The container shows its own certificate; without one, or with another's, nobody is told."""
    own = authority.issue("own")
    pair = (str(own.certificate), str(own.key))
    env = {"CHIASM_TLS_CERT_FILE": pair[0], "CHIASM_TLS_KEY_FILE": pair[1]}
    server = Server("127.0.0.1", 0, tls=PeerTls(config_of(own)))
    url = f"grpcs://{server.address}"
    await server.start(("some.Service",))

    async def well(path: str, shown: tuple[str, str] | None = pair) -> bool:
        return await asyncio.to_thread(is_well, f"{url}/{path}", shown)

    try:
        assert [await well("live"), await well(""), await well("unheard.of")] == [
            True,
            False,
            False,
        ]
        await server.ready(True)
        assert [await well(""), await well("some.Service")] == [True, True]
        assert not await well("", None)
        assert await asyncio.to_thread(is_live, "decoder", env | {"CHIASM_PORT": str(server.port)})
    finally:
        await server.stop()
    assert not await well("live")


async def test_pages_are_probed_by_their_status(authority: Authority) -> None:
    own = authority.issue("pages")
    registry = CollectorRegistry()
    plain = serve_metrics(registry, "127.0.0.1", 0)
    secured = serve_metrics(registry, "127.0.0.1", 0, PeerTls(config_of(own)))
    pair = (str(own.certificate), str(own.key))
    assert await asyncio.to_thread(is_well, f"http://127.0.0.1:{plain}/metrics")
    assert not await asyncio.to_thread(is_well, f"http://127.0.0.1:{secured}/metrics")
    assert await asyncio.to_thread(is_well, f"https://127.0.0.1:{secured}/metrics", pair)
    assert not await asyncio.to_thread(is_well, f"https://127.0.0.1:{secured}/metrics")


def test_the_prober_starts_with_little() -> None:
    """Every container starts it every few seconds."""
    code = "import sys, chiasm.probe; print(*sys.modules)"
    run = (sys.executable, "-c", code)
    loaded = set(subprocess.run(run, check=True, capture_output=True, text=True).stdout.split())
    assert {name for name in loaded if name.startswith("chiasm")} == {"chiasm", "chiasm.probe"}
    assert not loaded & {"grpc", "asyncio", "http.client", "urllib.request", "email", "argparse"}


def test_no_session_is_resumed(authority: Authority) -> None:
    """Else who was let in once would be let in after the CA has gone."""
    own = authority.issue("session")
    port = serve_metrics(CollectorRegistry(), "127.0.0.1", 0, PeerTls(config_of(own)))
    context = ssl.create_default_context(cafile=str(own.ca))
    context.load_cert_chain(own.certificate, own.key)
    session = None
    for _ in range(3):
        with connected(context, port, session) as secured:
            assert secured.version() == "TLSv1.3"
            assert not secured.session_reused
            while secured.recv(1000):  # to the end: a connection that is cut leaves no session
                session = secured.session or session


def test_who_would_keep_sessions_by_their_ids_is_refused(authority: Authority) -> None:
    own = authority.issue("old")
    port = serve_metrics(CollectorRegistry(), "127.0.0.1", 0, PeerTls(config_of(own)))
    context = ssl.create_default_context(cafile=str(own.ca))
    context.load_cert_chain(own.certificate, own.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"), connected(context, port):
        pass


def connected(
    context: ssl.SSLContext, port: int, session: ssl.SSLSession | None = None
) -> ssl.SSLSocket:
    """A connection that has asked for the metrics."""
    plain = socket.create_connection(("127.0.0.1", port), 100)
    secured = context.wrap_socket(plain, server_hostname=NAME, session=session)
    secured.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    return secured
