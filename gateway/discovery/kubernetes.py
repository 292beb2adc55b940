"""Addresses by the API server of a cluster: EndpointSlices of Services, listed and then watched.

A thread for each namespace owns the calls and hands sets of peers to the event loop. Whatever
happens to the API server, the last known set stays.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial

from gateway.discovery.api_server import ApiServer, Cluster, Patience, Refused, find_cluster
from gateway.discovery.base import Peer, PeerRole
from gateway.discovery.slices import SERVICE_LABEL, Service, SliceTable, service_of

logger = logging.getLogger(__name__)

_GONE = 410
_FIRST_RETRY_S = 0.2
_MAX_RETRY_S = 5.0


class _Watcher:
    """Follows the Services of one namespace in a thread of its own.

    Args:
        api: Used by this thread alone.
        services: All of one namespace.
        tell: Called in the thread with every set of peers, changed or not.
    """

    def __init__(
        self,
        api: ApiServer,
        services: tuple[Service, ...],
        tell: Callable[[frozenset[Peer]], None],
    ) -> None:
        self._api = api
        self._services = services
        self._tell = tell
        self._namespace = services[0].namespace
        names = ",".join(sorted({service.name for service in services}))
        self._selector = f"{SERVICE_LABEL} in ({names})"
        self._table = SliceTable()
        self._version = ""
        self._failures = 0
        self._trouble: dict[str, str] = {}
        self._stopping = threading.Event()
        name = f"slices {self._namespace}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """The thread ends soon; nobody waits for it."""
        self._stopping.set()
        self._api.cut()

    def _run(self) -> None:
        """Lists once, then watches; lists again only when what it knows cannot be resumed."""
        while not self._stopping.is_set():
            try:
                if not self._version:
                    self._list()
                self._watch()
                self._failures = 0
            except Refused as error:
                self._version = ""
                self._failures += 1
                self._say("", "" if error.status == _GONE else f"the API server refuses: {error}")
            except (OSError, ValueError, LookupError, TypeError) as error:
                self._failures += 1
                self._say("", f"no answer from the API server: {error!r}")
            self._stopping.wait(_back_off(self._failures))

    def _list(self) -> None:
        slices, self._version = self._api.list(self._namespace, self._selector)
        self._table.replace(slices)
        self._say("", "")
        self._publish()

    def _watch(self) -> None:
        for kind, item in self._api.watch(self._namespace, self._selector, self._version):
            if kind != "BOOKMARK":
                self._table.apply(kind, item)
                self._publish()
            self._version = item["metadata"]["resourceVersion"]
            self._failures = 0
            self._say("", "")

    def _publish(self) -> None:
        found: frozenset[Peer] = frozenset()
        for service in self._services:
            peers = self._table.peers(service)
            self._say(f"/{service.name}:{service.port}", "" if peers else "has no addresses")
            found |= peers
        self._tell(found)

    def _say(self, what: str, trouble: str) -> None:
        if self._stopping.is_set() or trouble == self._trouble.get(what, ""):
            return
        self._trouble[what] = trouble
        if trouble:
            logger.warning("%s%s: %s", self._namespace, what, trouble)
        else:
            logger.info("%s%s: well again", self._namespace, what)


class KubernetesDiscovery:
    """Follows the EndpointSlices of Services.

    Args:
        encoders: Services, as `service_of` reads them.
        decoders: Likewise.
        cluster: Where the API server is; by default that of this pod, or of the kubeconfig.
        patience: For how long its answers are waited for.

    Raises:
        ValueError: A Service is malformed, the client is not installed, or there is no cluster.
    """

    def __init__(
        self,
        *,
        encoders: tuple[str, ...],
        decoders: tuple[str, ...],
        cluster: Cluster | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._cluster = cluster or find_cluster()
        self._patience = patience or Patience()
        own = self._cluster.namespace
        self._services = tuple(
            service_of(role, url, namespace=own)
            for role, urls in ((PeerRole.ENCODER, encoders), (PeerRole.DECODER, decoders))
            for url in urls
        )

    async def watch(self) -> AsyncIterator[frozenset[Peer]]:
        """Yields once the API server has answered, and again whenever an address comes or goes."""
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        known: dict[str, frozenset[Peer]] = {}

        def take(namespace: str, peers: frozenset[Peer]) -> None:
            known[namespace] = peers
            changed.set()

        def tell(namespace: str, peers: frozenset[Peer]) -> None:
            with suppress(RuntimeError):  # the loop has ended before the thread
                loop.call_soon_threadsafe(take, namespace, peers)

        watchers = [
            _Watcher(self._api(), services, partial(tell, namespace))
            for namespace, services in self._by_namespace().items()
        ]
        told: frozenset[Peer] | None = None
        try:
            for watcher in watchers:
                watcher.start()
            while True:
                await changed.wait()
                changed.clear()
                peers = frozenset[Peer]().union(*known.values())
                if peers != told:
                    told = peers
                    yield peers
        finally:
            for watcher in watchers:
                watcher.stop()

    def _api(self) -> ApiServer:
        return ApiServer(self._cluster.configuration, self._patience)

    def _by_namespace(self) -> dict[str, tuple[Service, ...]]:
        result: dict[str, tuple[Service, ...]] = {}
        for service in self._services:
            result[service.namespace] = (*result.get(service.namespace, ()), service)
        return result


def _back_off(failures: int) -> float:
    longest = min(_MAX_RETRY_S, _FIRST_RETRY_S * 2.0 ** min(failures, 16))
    return longest * random.uniform(0.5, 1.0)
