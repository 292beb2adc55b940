"""Addresses by EndpointSlices: listed, watched, kept while the API server is away (E04, E10)."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from chiasm.config import GatewayConfig
from chiasm.fakes.serving import serving
from gateway.discovery import Fleet, KubernetesDiscovery, discovery_for
from gateway.discovery import api_server as reached
from gateway.discovery import kubernetes as watcher
from gateway.discovery.api_server import Patience, find_cluster
from gateway.discovery.base import Peer, PeerRole
from gateway.discovery.slices import Service, addresses, service_of
from tests.unit.gateway_core.api_server import FakeApiServer, api_server, endpoint, slice_of
from tests.unit.gateway_core.conftest import EXPECTED
from tests.unit.gateway_core.test_dns import encoder
from tests.waiting import until

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


@pytest.fixture
def api() -> Iterator[FakeApiServer]:
    with api_server() as server:
        yield server


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a watcher waited for before it tried again."""
    found: list[float] = []

    real = watcher._back_off

    def back_off(failures: int) -> float:
        found.append(real(failures))
        return found[-1]

    monkeypatch.setattr(watcher, "_back_off", back_off)
    return found


class Watching:
    """The sets that a discovery yields, and the last of them."""

    def __init__(self) -> None:
        self.sets: list[frozenset[Peer]] = []

    @property
    def hosts(self) -> set[str]:
        """Encoders of the last set."""
        last = self.sets[-1] if self.sets else ()
        return {peer.address.rpartition(":")[0] for peer in last if peer.role is PeerRole.ENCODER}

    async def becomes(self, *hosts: str) -> None:
        await until(lambda: self.sets and self.hosts == set(hosts))


@asynccontextmanager
async def watching(api: FakeApiServer, patience: Patience | None = None) -> AsyncIterator[Watching]:
    found = Watching()
    discovery = KubernetesDiscovery(
        encoders=("encoders:grpc",),
        decoders=("decoders.models:50051",),
        cluster=api.cluster,
        patience=patience,
    )

    async def follow() -> None:
        async for peers in discovery.watch():
            found.sets.append(peers)

    task = asyncio.create_task(follow())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not watchers())


def watchers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("slices ")]


# --- what slices mean ------------------------------------------------------------------------


def test_only_pods_that_are_ready_and_stay_are_dialled() -> None:
    item = slice_of(
        "s",
        "encoders",
        endpoint(A),
        endpoint("10.0.0.4", ready=None),  # says nothing: taken for ready
        endpoint(B, ready=False, serving=False),
        endpoint(C, ready=True, serving=True, terminating=True),
        {"addresses": ["10.0.0.5"]},
        {"addresses": []},
    )
    assert addresses([item], "grpc") == {f"{A}:50051", "10.0.0.4:50051", "10.0.0.5:50051"}
    assert addresses([item | {"endpoints": None}], "grpc") == frozenset()


def test_slices_of_a_service_are_merged() -> None:
    first = slice_of("s-1", "encoders", endpoint(A), endpoint(B))
    second = slice_of("s-2", "encoders", endpoint(B), endpoint(C))
    assert addresses([first, second], "grpc") == {f"{host}:50051" for host in (A, B, C)}


def test_a_pod_of_two_families_is_one_peer() -> None:
    pods = [{"targetRef": {"kind": "Pod", "uid": uid}} for uid in ("one", "two")]
    six = slice_of("s-6", "e", endpoint("fd00::1", **pods[0]), endpoint("fd00::2", **pods[1]))
    four = slice_of("s-4", "e", endpoint(A, **pods[0]))
    found = addresses([six | {"addressType": "IPv6"}, four], "grpc")
    assert found == {f"{A}:50051", "[fd00::2]:50051"}


@pytest.mark.parametrize(
    ("ports", "port", "number"),
    [
        ([{"name": "grpc", "port": 50051}, {"name": "metrics", "port": 9090}], "grpc", 50051),
        ([{"name": "grpc", "port": 50051}, {"name": "metrics", "port": 9090}], "9090", 9090),
        ([{"name": "grpc", "port": 50051}], "80", 50051),  # the Service's own number
        ([{"name": "", "port": 50051}, {"name": "metrics", "port": 9090}], "80", None),
        ([{"name": "http", "port": 8000}], "grpc", None),
        (None, "50051", 50051),
        (None, "grpc", None),
    ],
)
def test_ports_by_name_or_number(ports: Any, port: str, number: int | None) -> None:
    found = addresses([slice_of("s", "encoders", endpoint(A), ports=ports)], port)
    assert found == (frozenset() if number is None else {f"{A}:{number}"})


def test_services_are_named_with_or_without_their_namespace() -> None:
    def read(url: str) -> Service:
        return service_of(PeerRole.ENCODER, url, namespace="own")

    assert read("encoders:grpc") == Service(PeerRole.ENCODER, "own", "encoders", "grpc")
    assert read("encoders.vision:1") == Service(PeerRole.ENCODER, "vision", "encoders", "1")
    assert read("encoders.vision.svc.cluster.local:1") == read("grpc://encoders.vision:1")
    for wrong in ("encoders", ":1", "encoders:", "a.b.c:1", "a..svc:1", "http://encoders:1/"):
        with pytest.raises(ValueError, match="does not name a Service"):
            read(wrong)


# --- following the API server ----------------------------------------------------------------


async def test_pods_come_go_and_come_back(api: FakeApiServer) -> None:
    api.put(slice_of("e-1", "encoders", endpoint(A)))
    api.put(slice_of("d-1", "decoders", endpoint("10.0.1.1")))
    async with watching(api) as found:
        await found.becomes(A)
        assert found.sets[-1] == {
            Peer(PeerRole.ENCODER, f"{A}:50051"),
            Peer(PeerRole.DECODER, "10.0.1.1:50051"),
        }
        api.put(slice_of("e-2", "encoders", endpoint(B)))
        await found.becomes(A, B)
        api.put(slice_of("e-1", "encoders", endpoint(A, terminating=True)))
        await found.becomes(B)
        api.delete("e-2")
        await found.becomes()
        api.put(slice_of("e-1", "encoders", endpoint(A)))
        await found.becomes(A)
        told = len(found.sets)
        api.put(slice_of("e-1", "encoders", endpoint(A, nodeName="elsewhere")))
        api.put(slice_of("e-3", "encoders", endpoint(C)))
        await found.becomes(A, C)
        assert len(found.sets) == told + 1, "what changes no address is not told"
        assert api.count("list") == api.count("watch") == 1
        for _, query in api.requests:
            assert query["labelSelector"] == "kubernetes.io/service-name in (decoders,encoders)"
        assert api.requests[1][1]["allowWatchBookmarks"].lower() == "true"


async def test_a_watch_that_ends_is_resumed_where_it_was(api: FakeApiServer) -> None:
    api.put(slice_of("e-1", "encoders", endpoint(A)))
    async with watching(api, Patience(watch_s=1)) as found:
        await found.becomes(A)
        await until(lambda: api.count("watch"))
        api.bookmark()

        def versions() -> list[int]:
            return [int(q["resourceVersion"]) for kind, q in api.requests if kind == "watch"]

        first = versions()[0]
        await until(lambda: versions()[-1] != first)
        assert set(versions()) == {first, first + 1}, "the bookmark"
        api.put(slice_of("e-1", "encoders", endpoint(B)))
        await found.becomes(B)
        assert api.count("list") == 1


async def test_a_connection_that_breaks_loses_nothing(api: FakeApiServer) -> None:
    api.put(slice_of("e-1", "encoders", endpoint(A)))
    async with watching(api) as found:
        await found.becomes(A)
        await until(lambda: api.count("watch") == 1)
        api.cut()
        api.put(slice_of("e-2", "encoders", endpoint(B)))
        await found.becomes(A, B)
        assert (api.count("list"), len(found.sets)) == (1, 2)


async def test_what_was_forgotten_is_listed_again(api: FakeApiServer) -> None:
    api.put(slice_of("e-1", "encoders", endpoint(A)))
    async with watching(api) as found:
        await found.becomes(A)
        await until(lambda: api.count("watch") == 1)
        with api.quiet():  # nobody hears of these
            api.put(slice_of("e-2", "encoders", endpoint(B)))
            api.delete("e-1")
            api.forget()
        await found.becomes(B)
        assert api.count("list") == 2
        api.put(slice_of("e-3", "encoders", endpoint(C)))
        await found.becomes(B, C)
        assert api.count("list") == 2


async def test_an_answer_of_410_is_listed_again_too(api: FakeApiServer) -> None:
    api.put(slice_of("e-1", "encoders", endpoint(A)))
    async with watching(api, Patience(watch_s=1)) as found:
        await found.becomes(A)
        await until(lambda: api.count("watch"))
        api.refusal = 410
        asked = len(api.requests)
        await until(lambda: len(api.requests) >= asked + 2)  # the first of them is over
        api.refusal = 0
        api.put(slice_of("e-2", "encoders", endpoint(B)))
        await found.becomes(A, B)
        assert api.count("list") >= 2


async def test_the_last_known_set_outlives_the_api_server(
    api: FakeApiServer, caplog: pytest.LogCaptureFixture, waits: list[float]
) -> None:
    api.put(slice_of("e-1", "encoders", endpoint(A)))
    async with watching(api) as found:
        await found.becomes(A)
        with caplog.at_level(logging.INFO):
            api.stop()
            await until(lambda: len(waits) >= 4)
            assert found.hosts == {A} and len(found.sets) == 1
            api.put(slice_of("e-2", "encoders", endpoint(B)))
            api.start()
            await found.becomes(A, B)
            api.put(slice_of("e-1", "encoders", endpoint(C)))
            await found.becomes(B, C)
        said = [r.getMessage() for r in caplog.records if r.name.startswith("gateway.discovery")]
        assert len([line for line in said if "no answer from the API server" in line]) <= 4
        assert said[-1] == "models: well again"


async def test_a_refusal_is_said_and_tried_again_ever_more_rarely(
    api: FakeApiServer, caplog: pytest.LogCaptureFixture, waits: list[float]
) -> None:
    api.put(slice_of("e-1", "encoders", endpoint(A)))
    api.refusal = 403
    async with watching(api) as found:
        await until(lambda: "the API server refuses: 403" in caplog.text)
        await until(lambda: api.count("list") >= 4)
        assert all(wait_s >= 0.1 * 2**n for n, wait_s in enumerate(waits, 1)), waits
        assert caplog.text.count("refuses") == 1
        assert not found.sets
        api.refusal = 0
        await found.becomes(A)


async def test_a_connection_that_is_only_half_open_is_noticed(api: FakeApiServer) -> None:
    api.put(slice_of("e-1", "encoders", endpoint(A)))
    async with watching(api, Patience(watch_s=1, grace_s=0.2)) as found:
        api.silent = True
        await found.becomes(A)
        await until(lambda: api.count("watch"))
        api.put(slice_of("e-2", "encoders", endpoint(B)))
        api.silent = False  # for new watches; that one has not woken up
        await found.becomes(A, B)
        assert api.count("list") == 1


async def test_a_service_without_addresses_is_named(
    api: FakeApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    api.put(slice_of("other", "encoder", endpoint(A)))
    async with watching(api) as found:
        await found.becomes()
        assert found.sets == [frozenset()]
    assert "models/encoders:grpc: has no addresses" in caplog.text
    assert "models/decoders:50051: has no addresses" in caplog.text


async def test_new_pods_are_described_and_used_as_soon_as_they_are_told_of(
    api: FakeApiServer,
) -> None:
    """The fleet does the same with them as with any other address; no list is read again."""
    async with serving(encoder()) as first, serving(encoder()) as second:
        ports = {server: [{"name": "grpc", "port": server.port}] for server in (first, second)}
        local = endpoint("127.0.0.1")
        api.put(slice_of("e-1", "encoders", local, ports=ports[first]))
        discovery = KubernetesDiscovery(
            encoders=("encoders:grpc",), decoders=("decoders:grpc",), cluster=api.cluster
        )
        fleet = Fleet(discovery, EXPECTED)
        fleet.start()
        try:
            await until(lambda: [e.address for e in fleet.encoders.endpoints] == [first.address])
            await until(lambda: api.count("watch") == 1)
            api.put(slice_of("e-2", "encoders", local, ports=ports[second]))
            await until(lambda: len(fleet.encoders.endpoints) == 2)
            assert (api.count("list"), api.count("watch")) == (1, 1), "by the watch that was open"
            api.delete("e-1")
            await until(lambda: [e.address for e in fleet.encoders.endpoints] == [second.address])
        finally:
            await fleet.close()
        await until(lambda: not watchers())


# --- finding the API server ------------------------------------------------------------------


def config(**more: Any) -> GatewayConfig:
    return GatewayConfig(model="demo", discovery="kubernetes", decoder_urls=("d:grpc",), **more)


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ValueError, match=r"pip install 'chiasm\[kubernetes\]'"):
        discovery_for(config())


def test_outside_of_any_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none")
    )
    with pytest.raises(ValueError, match="not in a pod .*, and no kubeconfig"):
        discovery_for(config())


def test_the_kubeconfigs_context_names_cluster_and_namespace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    path = tmp_path / "config"
    context = {"cluster": "c", "user": "u", "namespace": "vision"}
    path.write_text(
        yaml.safe_dump(
            {
                "current-context": "x",
                "contexts": [{"name": "x", "context": context}],
                "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
            }
        )
    )
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    cluster = find_cluster()
    assert (cluster.configuration.host, cluster.namespace) == ("http://127.0.0.1:1", "vision")
    assert isinstance(discovery_for(config()), KubernetesDiscovery)


def test_in_a_pod_the_service_account_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in (("token", "secret"), ("ca.crt", "pem"), ("namespace", "models\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    loader = "kubernetes.config.incluster_config.SERVICE_{}_FILENAME"
    monkeypatch.setattr(loader.format("TOKEN"), str(tmp_path / "token"))
    monkeypatch.setattr(loader.format("CERT"), str(tmp_path / "ca.crt"))
    monkeypatch.setattr(reached, "_OWN_NAMESPACE", tmp_path / "namespace")
    cluster = find_cluster()
    assert (cluster.configuration.host, cluster.namespace) == ("https://10.96.0.1:443", "models")
    assert cluster.configuration.api_key == {"BearerToken": "bearer secret"}
