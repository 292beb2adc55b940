"""The API server of a cluster, asked for EndpointSlices with the `kubernetes` client.

The client is a synchronous one and an extra: it is imported where it is used.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.discovery.slices import Slice

_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. A half-open connection is noticed when a watch outlives what the server was told."""

    connect_s: float = 3.0
    list_s: float = 10.0
    watch_s: int = 30
    """The server ends a watch then; the next one resumes it."""
    grace_s: float = 5.0
    """How much longer a watch may be silent."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """How the API server is reached, as the client's own Configuration, and our namespace."""

    configuration: Any
    namespace: str


class Refused(Exception):
    """The API server answers, but not with what was asked for; 410 = list again."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status} {message}")
        self.status = status


class ApiServer:
    """Lists and watches EndpointSlices over one connection. Used by one thread; `cut` by any.

    Args:
        configuration: A `kubernetes.client.Configuration`.
        patience: For how long calls may take.
    """

    def __init__(self, configuration: Any, patience: Patience | None = None) -> None:
        from kubernetes import client

        configuration.retries = False  # ours back off, and know what to resume
        self._api = client.DiscoveryV1Api(client.ApiClient(configuration))
        self._patience = patience or Patience()
        self._lock = threading.Lock()
        self._raw: Any = None
        self._ended = False

    def list(self, namespace: str, selector: str) -> tuple[list[Slice], str]:
        """The slices and the resourceVersion they are of. Raises Refused, OSError."""
        timeout = (self._patience.connect_s, self._patience.list_s)
        with self._call(namespace, label_selector=selector, _request_timeout=timeout) as response:
            found = json.loads(b"".join(response))
        return found.get("items") or [], found["metadata"]["resourceVersion"]

    def watch(self, namespace: str, selector: str, version: str) -> Iterator[tuple[str, Slice]]:
        """(kind, slice) of each event after `version`, until the server ends the watch.

        Raises:
            Refused: Also for an ERROR event.
            OSError: The connection broke, or is silent for longer than the server was told.
        """
        seconds = self._patience.watch_s
        with self._call(
            namespace,
            label_selector=selector,
            resource_version=version,
            watch=True,
            allow_watch_bookmarks=True,
            timeout_seconds=seconds,
            _request_timeout=(self._patience.connect_s, seconds + self._patience.grace_s),
        ) as response:
            for line in _lines(response):
                event = json.loads(line)
                item = event["object"]
                if event["type"] == "ERROR":
                    raise Refused(item.get("code") or 0, item.get("message") or "")
                yield event["type"], item

    def cut(self) -> None:
        """Ends the call that is going on, and each later one, with OSError."""
        with self._lock:
            self._ended = True
            if self._raw is not None:
                # It may have ended by itself: then there is nothing to wake.
                with suppress(OSError, RuntimeError, ValueError):
                    self._raw.shutdown()

    @contextmanager
    def _call(self, namespace: str, **arguments: Any) -> Iterator[Iterator[bytes]]:
        """The bytes of an answer as they arrive. The library's errors become ours."""
        from kubernetes.client.exceptions import ApiException
        from kubernetes.config import ConfigException
        from urllib3.exceptions import HTTPError

        try:
            raw: Any = self._api.list_namespaced_endpoint_slice(
                namespace, _preload_content=False, **arguments
            )
            with self._lock:
                self._raw = raw
                ended = self._ended
            try:
                if ended:
                    raise OSError("stopped")
                yield raw.stream(amt=None, decode_content=True)
            finally:
                with self._lock:
                    self._raw = None
                    raw.close()
        except ApiException as error:
            raise Refused(error.status or 0, str(error.reason)) from None
        except (HTTPError, ConfigException) as error:
            raise OSError(str(error)) from None


def find_cluster() -> Cluster:
    """The cluster this pod runs in, else the one of the kubeconfig's current context.

    Raises:
        ValueError: The client is not installed, or there is neither.
    """
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise ValueError(
            f"--discovery kubernetes needs the extra `kubernetes`: pip install 'chiasm[kubernetes]'"
            f" ({error})"
        ) from None
    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
        return Cluster(configuration, _OWN_NAMESPACE.read_text(encoding="utf-8").strip())
    except (config.ConfigException, OSError) as error:
        outside = str(error)
    try:
        config.load_kube_config(client_configuration=configuration)
        _, context = config.list_kube_config_contexts()
    except (config.ConfigException, OSError) as error:
        raise ValueError(
            f"--discovery kubernetes: not in a pod ({outside}), and no kubeconfig ({error})"
        ) from None
    return Cluster(configuration, context["context"].get("namespace") or "default")


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """What is left without an end of line was cut off, and is asked for again."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from filter(None, lines)
