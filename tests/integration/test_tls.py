"""Mutual TLS: who may come in, at every port there is, and certificates that change in use."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chiasm.channel import CHANNEL_OPTIONS
from chiasm.probe import is_well
from chiasm.transport.agent import nixl_is_installed
from tests.integration.certificates import NAME, Authority, Identity
from tests.integration.cluster import PATIENCE_S, Cluster
from tests.integration.load import Load
from tests.integration.ports import listening
from tests.integration.secured import STRANGERS, Secured, local

pytestmark = pytest.mark.timeout(600)

SERVING = health_pb2.HealthCheckResponse.SERVING
# Ports without TLS, by who listens, and why that is right. All are bound to loopback: whoever
# reaches them is inside the pod.
PLAIN = {
    "gateway": "a gateway of several workers: their metrics, read by the parent that sums them",
    "decoder_svc": "ranks of one host: torch.distributed's pairs, on the loopback interface",
}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    found = Secured(tmp_path_factory.mktemp("tls"))
    try:
        yield found
    finally:
        codes = found.stack.stop()
        assert set(codes.values()) == {0}, codes


def health(address: str, identity: Identity) -> object:
    """By gRPC: its status, or the error's code."""
    options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", NAME))
    files = (identity.ca, identity.key, identity.certificate)
    credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
    with grpc.secure_channel(address, credentials, options=options) as channel:
        try:
            request = health_pb2.HealthCheckRequest()
            return health_pb2_grpc.HealthStub(channel).Check(request, timeout=30).status
        except grpc.RpcError as error:
            return error.code()


def exposed(secured: Secured) -> list[int]:
    return sorted({port.port for port in secured.ports() if not port.is_loopback})


def test_every_port_is_known(secured: Secured) -> None:
    """What a service listens on is counted: a port that is added must be added here."""
    numbers = {
        service.name + str(number): sorted(
            {port.port for port in listening(service.process.pid) if not port.is_loopback}
        )
        for number, service in enumerate(secured.services)
    }
    assert {name: len(ports) for name, ports in numbers.items()} == {
        "encoder_svc0": 5,  # the list of workers; their own ports, and their metrics
        "decoder_svc1": 2,  # gRPC, metrics
        "gateway2": 3,  # REST, gRPC, metrics
        "gateway3": 3,
    }, numbers
    inside = [port for port in secured.ports() if port.is_loopback]
    for port in inside:
        role = next((role for role in PLAIN if f" -m {role} " in port.owner), "")
        assert role or "multiprocessing" in port.owner, port


@pytest.mark.parametrize("who", STRANGERS)
def test_strangers_are_refused_on_every_port(secured: Secured, who: str) -> None:
    ports = exposed(secured)
    assert len(ports) == 13
    for port in ports:
        assert secured.answer(port, who) == b"", port


def test_friends_are_let_in_on_every_port(secured: Secured) -> None:
    """The check above would notice a port that says something."""
    for port in exposed(secured):
        said = secured.answer(port, "friend")
        assert said.startswith(b"HTTP/1") or said[3:4] == b"\x04", (port, said)


def test_probes_come_with_the_pods_own_certificate(secured: Secured) -> None:
    """As the chart has kubelet run them in the container."""
    encoder, decoder = (local(s.address) for s in (secured.encoder, secured.decoder))
    gateways = [local(service.address) for service in (secured.gateway, secured.several)]
    own = secured.identities["decoder_svc"]
    urls = [f"grpcs://{address}/{what}" for address in (encoder, decoder) for what in ("", "live")]
    urls += [f"https://{gateway}/{what}" for gateway in gateways for what in ("health", "ready")]
    pair = (str(own.certificate), str(own.key))
    for url in urls:
        Cluster.until(lambda url=url: is_well(url, pair))  # type: ignore[misc]
        assert not is_well(url), url
        assert not is_well(url.replace("s://", "://")), url


def test_users_with_a_certificate_get_answers(secured: Secured) -> None:
    for service in (secured.gateway, secured.several):
        load = Load(f"https://{local(service.address)}", secured.user)
        load.start()
        try:
            Cluster.until(lambda load=load: load.answered >= 10 or load.failures)
        finally:
            load.stop()
        assert not load.failures, load.failures[:3]
        identity = secured.identities["user"]
        assert health(local(service.grpc), identity) == SERVING


@pytest.mark.parametrize("padding", [0, 100_000, 3_000_000])
def test_large_bodies_come_through(secured: Secured, padding: int) -> None:
    """They are read to their place past the parser, here out of records of TLS."""
    message = {"role": "user", "content": "What is it?"}
    request = {"model": "demo", "messages": [message], "max_tokens": 2, "ignore_eos": True}
    body = b" " * padding + json.dumps(request).encode()
    for service in (secured.gateway, secured.several):
        url = f"https://{local(service.address)}/v1/chat/completions"
        with secured.user() as user:
            for _ in range(3):  # on one connection
                reply = user.post(url, content=body, headers={"content-type": "application/json"})
                assert reply.status_code == 200, reply.text
                assert reply.json()["usage"]["completion_tokens"] == 2


@pytest.mark.skipif(not nixl_is_installed(), reason="nixl is not installed")
def test_what_nixl_opens_is_the_one_exception(secured: Secured) -> None:
    """It listens in plain text on each interface, and only where it is asked for (docs/deploy.md).

    The ranks of a decoder over several hosts are the other one; here is one host.
    """
    ports = {}
    for role in ("encoder_svc", "decoder_svc"):
        service = secured.start(role, "--transport", "nixl", "--metrics-port", "0").wait_ready()
        ports[role] = {port for port in listening(service.process.pid) if not port.is_loopback}
        ours = {port.port for port in ports[role] if port.host in ("0.0.0.0", "::")}
        assert len(ours) == 2, "gRPC and metrics"
        for port in ours:
            assert secured.answer(port, "nothing") == secured.answer(port, "plain text") == b""
        agents = [port for port in ports[role] if port.port not in ours]
        assert len({port.host for port in agents}) == len(agents), "one for each interface"
        service.process.terminate()
        assert service.process.wait(PATIENCE_S) == 0


def test_a_door_may_show_a_certificate_and_ask_for_none(secured: Secured) -> None:
    peers = ("--encoder-urls", local(secured.encoder.address))
    peers += ("--decoder-urls", local(secured.decoder.address))
    flags = (*peers, "--metrics-port", "0", "--front-door")
    shown, plain = (secured.start("gateway", *flags, door) for door in ("tls", "plain"))
    context = ssl.create_default_context(cafile=str(secured.ours.certificate))
    context.check_hostname = False
    url = f"https://{local(shown.wait_ready().address)}/health"
    assert httpx.get(url, verify=context, timeout=60).status_code == 200
    assert secured.answer(int(shown.grpc.rpartition(":")[2]), "nothing")
    url = f"http://{local(plain.wait_ready().address)}/health"
    assert httpx.get(url, timeout=60).status_code == 200
    for service in (shown, plain):
        doors = {int(address.rpartition(":")[2]) for address in (service.address, service.grpc)}
        (metrics,) = {port.port for port in listening(service.process.pid)} - doors
        assert secured.answer(metrics, "nothing") == b"", "it is no door"
        service.process.terminate()
        assert service.process.wait(PATIENCE_S) == 0


def test_a_client_with_the_wrong_name_for_a_server_is_not_fooled(secured: Secured) -> None:
    """A server whose certificate is of our CA but for another name gets no media."""
    impostor = secured.ours.issue("impostor", dns="somebody-else")
    service = secured.stack.start("decoder_svc", *impostor.flags).wait_ready()
    peers = ("--decoder-urls", service.address)
    gateway = secured.stack.start("gateway", *peers, *secured.ours.issue("client").flags)
    url = f"https://{gateway.wait_ready().address}/ready"
    with secured.user() as user:

        def trouble() -> str:
            (endpoint,) = user.get(url).json()["endpoints"]
            return str(endpoint["trouble"])

        Cluster.until(lambda: "not yet" not in trouble())
        assert user.get(url).status_code == 503
    for stopped in (gateway, service):
        stopped.process.terminate()
        assert stopped.process.wait(PATIENCE_S) == 0


def everybody_can_dial_everybody_anew(secured: Secured) -> None:
    """Connections of before say nothing of certificates of now."""
    assert all(s.process.poll() is None for s in secured.services)
    secured.encoder = secured.restart(secured.encoder, "--dp-size", "2", "--transport", "grpc")
    secured.decoder = secured.restart(secured.decoder, "--pp-size", "2", "--transport", "grpc")
    secured.until_in_use()
    load = Load(secured.url, secured.user)
    load.start()
    try:
        Cluster.until(lambda: load.answered >= 10 or bool(load.failures))
    finally:
        load.stop()
    assert not load.failures, load.failures[:3]


def test_certificates_and_their_ca_are_replaced_without_a_restart(
    secured: Secured, tmp_path: Path
) -> None:
    """Both CAs are believed in, then certificates are of the new one, then the old one goes.

    Each request comes on a connection of its own, so that hands are shaken all the time.
    """
    new = Authority(tmp_path / "new")
    before = {service.process.pid for service in secured.services}
    loads = [
        Load(f"https://{local(gateway.address)}", secured.user, anew=True)
        for gateway in (secured.gateway, secured.several)
    ]
    for load in loads:
        load.start()
    try:
        for stage in ("both", "fresh", "final"):
            for role, identity in secured.identities.items():
                authority = secured.ours if stage == "both" else new
                fresh = authority.issue(f"{role}-{stage}")
                if stage != "final":
                    both = secured.ours.certificate.read_bytes() + new.certificate.read_bytes()
                    fresh.ca.write_bytes(both)
                identity.replace_by(fresh)
            for load in loads:
                goal = load.answered + 30
                Cluster.until(lambda it=load, g=goal: it.answered >= g or it.failures)
    finally:
        for load in loads:
            load.stop()
    assert not any(load.failures for load in loads), [load.failures[:3] for load in loads]
    assert {service.process.pid for service in secured.services} == before
    ports = exposed(secured)
    assert len(ports) == 13
    for port in ports:
        assert secured.answer(port, "friend") == b"", "of the CA that went"
    old, secured.ours = secured.ours, new
    try:
        for port in ports:
            assert secured.answer(port, "friend"), port
        everybody_can_dial_everybody_anew(secured)
    finally:
        secured.ours = old
