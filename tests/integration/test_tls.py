"""Mutual TLS between services: who may come in, and certificates that change while in use."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chiasm.channel import CHANNEL_OPTIONS
from tests.integration.certificates import NAME, Authority, Identity
from tests.integration.cluster import Cluster, free_port
from tests.integration.load import Load
from tests.integration.stack import Service, Stack

pytestmark = pytest.mark.timeout(240)

SERVING = health_pb2.HealthCheckResponse.SERVING
STRANGERS = ("nothing", "plain text", "another CA", "expired")


class Secured:
    """An encoder of two workers, a decoder and a gateway, each with a certificate of its own."""

    def __init__(self, directory: Path) -> None:
        self.ours, self.theirs = Authority(directory / "ours"), Authority(directory / "theirs")
        self.identities = {
            role: self.ours.issue(role) for role in ("encoder_svc", "decoder_svc", "gateway")
        }
        self.metrics: dict[str, int] = {}
        self.health: dict[str, int] = {}
        self.stack = Stack("demo")
        self.encoder = self._start("encoder_svc", "--dp-size", "2")
        self.decoder = self._start("decoder_svc")
        peers = ("--encoder-urls", self.encoder.wait_ready().address)
        peers += ("--decoder-urls", self.decoder.wait_ready().address)
        self.gateway = self._start("gateway", *peers).wait_ready()
        self.url = f"http://{self.gateway.address}"
        Cluster.until(lambda: self.num_ready() == 4, 20)

    def num_ready(self) -> int:
        endpoints = httpx.get(f"{self.url}/ready").json()["endpoints"]
        return sum(endpoint["ready"] for endpoint in endpoints)

    def workers(self) -> list[str]:
        endpoints = httpx.get(f"{self.url}/ready").json()["endpoints"]
        return [e["address"] for e in endpoints if e["address"] != self.encoder.address]

    def restart(self, service: Service, *flags: str) -> Service:
        """The same at the same port, with its files as they are now."""
        service.process.terminate()
        assert service.process.wait(30) == 0
        port = service.address.rpartition(":")[2]
        return self._start(service.name, *flags, "--port", port).wait_ready()

    def _start(self, role: str, *flags: str) -> Service:
        self.metrics[role], self.health[role] = free_port(), free_port()
        ports = ("--metrics-port", self.metrics[role], "--health-port", self.health[role])
        tls = self.identities[role].flags
        return self.stack.start(role, *flags, *map(str, ports), *tls)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    found = Secured(tmp_path_factory.mktemp("tls"))
    try:
        yield found
    finally:
        codes = found.stack.stop()
        assert set(codes.values()) == {0}, codes


def identity_of(secured: Secured, who: str) -> Identity | None:
    """What a client shows; it believes in the services' CA in any case."""
    if who == "another CA":
        return replace(secured.theirs.issue("stranger"), ca=secured.ours.certificate)
    if who == "expired":
        return secured.ours.issue("expired", days=-1)
    return secured.ours.issue("friend") if who == "friend" else None


def grpc_answer(address: str, secured: Secured, who: str) -> object:
    """Health by gRPC: its status, or the error's code."""
    options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", NAME))
    if who == "plain text":
        channel = grpc.insecure_channel(address, options=options)
    else:
        shown = identity_of(secured, who)
        pair = (shown.key.read_bytes(), shown.certificate.read_bytes()) if shown else (None, None)
        credentials = grpc.ssl_channel_credentials(secured.ours.certificate.read_bytes(), *pair)
        channel = grpc.secure_channel(address, credentials, options=options)
    with channel:
        try:
            request = health_pb2.HealthCheckRequest()
            return health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status
        except grpc.RpcError as error:
            return error.code()


def http_answer(port: int, secured: Secured, who: str) -> bytes:
    """The first line of what the metrics port answers; empty: refused."""
    context = ssl.create_default_context(cafile=str(secured.ours.certificate))
    if shown := identity_of(secured, who):
        context.load_cert_chain(shown.certificate, shown.key)
    try:
        with ExitStack() as opened:
            stream = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            if who != "plain text":
                secure = context.wrap_socket(stream, server_hostname=NAME)
                stream = opened.enter_context(secure)
            stream.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            return stream.recv(100).partition(b"\r\n")[0]
    except OSError:
        return b""


@pytest.mark.parametrize("who", STRANGERS)
def test_strangers_are_refused_on_every_port(secured: Secured, who: str) -> None:
    addresses = {secured.encoder.address, secured.decoder.address, *secured.workers()}
    assert len(addresses) == 4
    for address in addresses:
        assert grpc_answer(address, secured, who) == grpc.StatusCode.UNAVAILABLE, address
    for role, port in secured.metrics.items():
        assert http_answer(port, secured, who) == b"", role


def test_peers_are_let_in_and_probes_find_a_port_of_health_alone(secured: Secured) -> None:
    for address in (secured.encoder.address, secured.decoder.address, *secured.workers()):
        assert grpc_answer(address, secured, "friend") == SERVING
    for port in secured.metrics.values():
        assert http_answer(port, secured, "friend") == b"HTTP/1.0 200 OK"
    for port in secured.health.values():
        address = f"127.0.0.1:{port}"
        assert grpc_answer(address, secured, "plain text") == SERVING
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/chiasm.v1.Decoder/Describe")(b"", timeout=5)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_client_with_the_wrong_name_for_a_server_is_not_fooled(secured: Secured) -> None:
    """A server whose certificate is of our CA but for another name gets no media."""
    impostor = secured.ours.issue("impostor", dns="somebody-else")
    service = secured.stack.start("decoder_svc", *impostor.flags).wait_ready()
    peers = ("--decoder-urls", service.address)
    gateway = secured.stack.start("gateway", *peers, *secured.ours.issue("client").flags)
    url = f"http://{gateway.wait_ready().address}/ready"

    def trouble() -> str:
        (endpoint,) = httpx.get(url).json()["endpoints"]
        return str(endpoint["trouble"])

    Cluster.until(lambda: "not yet" not in trouble(), 10)
    assert httpx.get(url).status_code == 503
    for stopped in (gateway, service):
        stopped.process.terminate()
        assert stopped.process.wait(20) == 0


def everybody_can_dial_everybody_anew(secured: Secured) -> None:
    """Connections of before say nothing of certificates of now."""
    assert all(s.process.poll() is None for s in (secured.encoder, secured.decoder))
    secured.encoder = secured.restart(secured.encoder, "--dp-size", "2")
    secured.decoder = secured.restart(secured.decoder)
    Cluster.until(lambda: secured.num_ready() == 4, 30)
    load = Load(secured.url)
    load.start()
    try:
        Cluster.until(lambda: load.answered >= 10 or bool(load.failures), 60)
    finally:
        load.stop()
    assert not load.failures, load.failures[:3]


def test_certificates_and_their_ca_are_replaced_without_a_restart(
    secured: Secured, tmp_path: Path
) -> None:
    """Both CAs are believed in, then certificates are of the new one, then the old one goes."""
    new = Authority(tmp_path / "new")
    load = Load(secured.url)
    load.start()
    try:
        stages = ("both", "fresh", "final")
        for stage in stages:
            for role, identity in secured.identities.items():
                authority = secured.ours if stage == "both" else new
                fresh = authority.issue(f"{role}-{stage}")
                if stage != "final":
                    both = secured.ours.certificate.read_bytes() + new.certificate.read_bytes()
                    fresh.ca.write_bytes(both)
                identity.replace_by(fresh)
            goal = load.answered + 60
            Cluster.until(lambda goal=goal: load.answered >= goal or bool(load.failures), 60)
    finally:
        load.stop()
    assert not load.failures, load.failures[:3]
    old = secured.ours
    assert grpc_answer(secured.decoder.address, secured, "friend") == grpc.StatusCode.UNAVAILABLE
    assert http_answer(secured.metrics["decoder_svc"], secured, "friend") == b""
    secured.ours = new
    try:
        assert grpc_answer(secured.decoder.address, secured, "friend") == SERVING
        assert http_answer(secured.metrics["gateway"], secured, "friend") == b"HTTP/1.0 200 OK"
        assert secured.num_ready() == 4
        everybody_can_dial_everybody_anew(secured)
    finally:
        secured.ours = old
