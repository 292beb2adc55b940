"""The gateway with the chart's own args and token, before real encoders and a decoder (E04, E10).

The pods are processes of this machine; the test writes their EndpointSlices, which in a cluster is
the work of a controller.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy.chart import Object, nested
from tests.integration.cluster import PATIENCE_S, free_port, scrape, total
from tests.integration.load import Load
from tests.integration.stack import Service, Stack
from tests.kube.address import own_address
from tests.kube.cluster import NAMESPACE, PLURALS, RELEASE, SLICES, Cluster, load_chart
from tests.kube.control_plane import until

pytestmark = pytest.mark.timeout(1800)

IN_USE_S = 5.0

LOCAL = ("--host", "--port", "--grpc-port", "--advertise-host", "--metrics-port", "--model")
DOWN_S = 30.0
OTHERS = ("api/v1/namespaces/default/pods", SLICES.replace(NAMESPACE, "default"))


class Pods:
    """Encoders and a decoder as processes at this machine's own address."""

    def __init__(self, stack: Stack, address: str) -> None:
        self._stack = stack
        self._address = address
        self.metrics_ports = [free_port() for _ in range(3)]
        started = [self._start("encoder_svc", port) for port in self.metrics_ports]
        started.append(self._start("decoder_svc", free_port()))
        *self.encoders, self.decoder = [
            service.wait_ready().address.replace("0.0.0.0", address) for service in started
        ]

    def encoded(self) -> list[int]:
        """How many pictures each encoder has taken so far."""
        return self._of_each("chiasm_encoder_requests_total")

    def at_work(self) -> list[int]:
        """How many each encoder has now."""
        return self._of_each("chiasm_encoder_open_encodes")

    def _of_each(self, name: str) -> list[int]:
        urls = [f"http://{self._address}:{port}/metrics" for port in self.metrics_ports]
        return [int(total(scrape(url), name)) for url in urls]

    def _start(self, role: str, metrics_port: int) -> Service:
        flags = ("--host", "0.0.0.0", "--advertise-host", self._address)
        return self._stack.start(role, *flags, "--metrics-port", str(metrics_port))


@pytest.fixture(scope="module")
def token(cluster: Cluster) -> str:
    """The gateway's, of a release with `gateway.discovery: kubernetes`."""
    with cluster.helm() as helm:
        values = nested("gateway.discovery", "kubernetes")
        helm.install(load_chart(), RELEASE, values, namespace=NAMESPACE)
    pod = cluster.own("Deployment")["chiasm-gateway"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"]
    return cluster.token_of(pod["serviceAccountName"])


@pytest.fixture
def stack() -> Iterator[Stack]:
    running = Stack("demo")
    try:
        yield running
    finally:
        running.stop()


def gateway_flags(cluster: Cluster) -> list[str]:
    """What the chart has the gateway started with, but for addresses of its own."""
    pod = cluster.own("Deployment")["chiasm-gateway"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return [arg for arg in container["args"] if arg.partition("=")[0] not in LOCAL]


def test_the_token_opens_nothing_but_slices_of_its_namespace(cluster: Cluster, token: str) -> None:
    assert cluster.call("GET", SLICES, token=token).status_code == 200
    for path in (*PLURALS.values(), *OTHERS, "api/v1/nodes"):
        assert cluster.call("GET", path, token=token).status_code == 403, path
    for method, path in (("POST", SLICES), ("DELETE", f"{SLICES}/x"), ("PUT", f"{SLICES}/x")):
        body = {"metadata": {"name": "x"}, "addressType": "IPv4", "endpoints": []}
        reply = cluster.call(method, path, token=token, json=body)
        assert reply.status_code == 403, (method, reply.text)
    assert cluster.call("GET", SLICES, token="another").status_code == 401


def test_requests_follow_the_slices_and_none_fails(
    cluster: Cluster, token: str, stack: Stack, tmp_path: Path
) -> None:
    address = own_address()
    if not address:
        pytest.skip("this machine has no address but loopback, which no EndpointSlice may hold")
    pods = Pods(stack, address)
    cluster.put_slice("d-1", "chiasm-decoder", pods.decoder)
    cluster.put_slice("e-1", "chiasm-encoder", pods.encoders[0])
    stack.env["KUBECONFIG"] = str(cluster.kubeconfig(tmp_path, token))
    gateway = stack.start("gateway", *gateway_flags(cluster)).wait_ready()
    load = Load(f"http://{gateway.address}")
    until(lambda: can_see(load.url, 2), PATIENCE_S, "the gateway uses both")
    load.start()
    try:
        one_pod_serves_all(pods, load)
        two_more_take_their_share(cluster, pods, load)
        nobody_misses_the_api_server(cluster, load)
        who_leaves_is_left_and_may_come_back(cluster, pods, load)
        until(lambda: load.answered + len(load.failures) >= 600, 600, "600 requests")
    finally:
        load.stop()
    assert not load.failures, load.failures[:5]
    assert load.answered >= 600
    print(f"{load.answered} requests answered, {len(load.failures)} failed")


def can_see(url: str, ready: int) -> bool:
    return sum(endpoint["ready"] for endpoint in listed(url)) == ready


def listed(url: str) -> list[Object]:
    found: list[Object] = httpx.get(f"{url}/ready", timeout=60).json()["endpoints"]
    return found


def strangers(url: str) -> set[str]:
    """Addresses that are listed as encoders, answer, and are not used."""
    return {
        e["address"]
        for e in listed(url)
        if e["role"] == "encoder" and not e["ready"] and "not yet" not in e["trouble"]
    }


def answers(load: Load, more: int) -> None:
    """Waits for further answers."""
    goal = load.answered + more
    until(lambda: load.answered >= goal or bool(load.failures), 600, f"{more} answers")
    assert not load.failures, load.failures[:5]


def one_pod_serves_all(pods: Pods, load: Load) -> None:
    answers(load, 100)
    until(lambda: pods.encoded()[0] >= 100, PATIENCE_S, "it has counted them")
    assert pods.encoded()[1:] == [0, 0]


def two_more_take_their_share(cluster: Cluster, pods: Pods, load: Load) -> None:
    for number in (1, 2):
        cluster.put_slice(f"e-{number + 1}", "chiasm-encoder", pods.encoders[number])
    used_s = until(lambda: min(pods.encoded()) > 0, PATIENCE_S, "new pods are in use")
    assert used_s < IN_USE_S
    before = pods.encoded()
    answers(load, 600)  # a share of a third is off by ten percent once in a million
    gained = [now - then for now, then in zip(pods.encoded(), before, strict=True)]
    shares = [100 * gain / sum(gained) for gain in gained]
    print(
        f"new pods in use after {used_s:.1f} s, shares of three: {[f'{s:.1f} %' for s in shares]}"
    )
    assert all(23 <= share <= 43 for share in shares), shares


def nobody_misses_the_api_server(cluster: Cluster, load: Load) -> None:
    cluster.plane.kill_api_server()
    down = time.monotonic()
    while time.monotonic() - down < DOWN_S:
        answers(load, 10)
        assert len(listed(load.url)) == 4, "what was known is kept"
    cluster.plane.start_api_server()


def who_leaves_is_left_and_may_come_back(cluster: Cluster, pods: Pods, load: Load) -> None:
    cluster.put_slice("e-2", "chiasm-encoder", pods.encoders[1], ready=False)
    cluster.delete_slice("e-3")
    # The watch was broken: the gateway may have to back off once more before it hears.
    dropped_s = until(lambda: can_see(load.url, 2), PATIENCE_S, "who has left is dropped")
    # A stranger has got the address of a pod that has gone: it answers, but is no encoder.
    cluster.put_slice("e-4", "chiasm-encoder", pods.decoder)
    until(lambda: pods.decoder in strangers(load.url), PATIENCE_S, "the stranger was asked")
    until(load.turn_over(), PATIENCE_S, "what was under way has ended")
    until(lambda: pods.at_work()[1:] == [0, 0], PATIENCE_S, "at the encoders as well")
    before = pods.encoded()
    answers(load, 100)
    until(lambda: pods.encoded()[0] >= before[0] + 100, PATIENCE_S, "it has counted them")
    assert pods.encoded()[1:] == before[1:]
    cluster.put_slice("e-2", "chiasm-encoder", pods.encoders[1])
    back_s = until(lambda: pods.encoded()[1] > before[1], PATIENCE_S, "who comes back is in use")
    assert back_s < IN_USE_S
    print(f"dropped after {dropped_s:.1f} s, in use again after {back_s:.1f} s")
