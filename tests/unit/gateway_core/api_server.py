"""An API server of its own process's threads: lists and watches EndpointSlices over real HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes import client

from gateway.discovery.api_server import Cluster
from tests.integration.cluster import free_port

Object = dict[str, Any]


def endpoint(address: str, *, ready: bool | None = True, **more: Any) -> Object:
    conditions = {key: more.pop(key) for key in ("serving", "terminating") if key in more}
    return {"addresses": [address], "conditions": {"ready": ready} | conditions} | more


def slice_of(name: str, service: str, *endpoints: Object, **more: Any) -> Object:
    """One EndpointSlice; its port is `grpc`, 50051."""
    labels = {"kubernetes.io/service-name": service}
    return {
        "metadata": {"name": name, "namespace": "models", "labels": labels},
        "addressType": "IPv4",
        "endpoints": list(endpoints),
        "ports": [{"name": "grpc", "port": 50051, "protocol": "TCP"}],
    } | more


class FakeApiServer:
    """Keeps slices and a log of events, of which it may forget the oldest.

    `requests` holds what was asked: ("list" | "watch", its query).
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.refusal = 0
        self.silent = False
        self._slices: dict[str, Object] = {}
        self._log: list[tuple[int, str, Object]] = []
        self._version = 100
        self._oldest = 0
        self._changed = threading.Condition()
        self._generation = 0
        self.server: ThreadingHTTPServer | None = None
        self._port = free_port()

    @property
    def cluster(self) -> Cluster:
        """How it is reached; `models` is our namespace."""
        configuration = client.Configuration()
        configuration.host = f"http://127.0.0.1:{self._port}"
        return Cluster(configuration, "models")

    def put(self, item: Object) -> None:
        """Makes or changes a slice."""
        kind = "MODIFIED" if item["metadata"]["name"] in self._slices else "ADDED"
        self._slices[item["metadata"]["name"]] = item
        self._record(kind, item)

    def delete(self, name: str) -> None:
        """Takes a slice away."""
        self._record("DELETED", self._slices.pop(name))

    def bookmark(self) -> None:
        """Says how far things are, as after changes to objects that are not watched."""
        self._record("BOOKMARK", {"metadata": {}})

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """What happens inside is in no watch's log before it ends."""
        with self._changed:
            yield

    def forget(self) -> None:
        """Compacts: whoever has not heard of everything must list again."""
        with self._changed:
            self._version += 10
            self._oldest = self._version
            self._log.clear()
            self._changed.notify_all()

    def cut(self) -> None:
        """Ends every watch in the middle of a line."""
        with self._changed:
            self._generation += 1
            self._changed.notify_all()

    def start(self) -> None:
        """Listens, on the same port each time."""
        handler = type("Handler", (_Handler,), {"api": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Connections break, new ones are refused."""
        assert self.server is not None
        self.server.shutdown()
        self.server.server_close()
        self.server = None
        self.cut()

    def count(self, kind: str) -> int:
        return sum(asked == kind for asked, _ in self.requests)

    def listing(self) -> Object:
        with self._changed:
            version = {"resourceVersion": str(self._version)}
            return {"metadata": version, "items": list(self._slices.values())}

    def events(self, version: int, seconds: float) -> Iterator[Object | None]:
        """What happens after `version`, until `seconds` have passed; None: cut here."""
        since, end = version, time.monotonic() + seconds
        generation, silent = self._generation, self.silent
        while (left := end - time.monotonic()) > 0:
            with self._changed:
                if since < self._oldest:
                    gone = {"kind": "Status", "code": 410, "message": "too old"}
                    yield {"type": "ERROR", "object": gone}
                    return
                new = [entry for entry in self._log if entry[0] > since and not silent]
                if not new and generation == self._generation:
                    self._changed.wait(min(left, 0.5))
                    continue
            if generation != self._generation:
                yield None
                return
            since = new[-1][0]
            for _, kind, item in new:
                yield {"type": kind, "object": item}

    def _record(self, kind: str, item: Object) -> None:
        with self._changed:
            self._version += 1
            metadata = item["metadata"] | {"resourceVersion": str(self._version)}
            self._log.append((self._version, kind, item | {"metadata": metadata}))
            self._changed.notify_all()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: FakeApiServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if self.api.server is None:  # a connection that was kept, of a server that has gone
            self.close_connection = True
            return
        assert url.path == "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
        watch = query.get("watch", "").lower() == "true"
        self.api.requests.append(("watch" if watch else "list", query))
        if self.api.refusal:
            self.send_error(self.api.refusal)
        elif watch:
            self._watch(query)
        else:
            body = json.dumps(self.api.listing()).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def _watch(self, query: dict[str, str]) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        seconds = 60.0 if self.api.silent else float(query["timeoutSeconds"])
        try:
            for event in self.api.events(int(query["resourceVersion"]), seconds):
                if event is None:
                    self._chunk(b'{"type": "ADD')
                    self.close_connection = True
                    return
                line = json.dumps(event).encode() + b"\n"
                self._chunk(line[:20])  # a line need not come in one piece
                self._chunk(line[20:])
            self._chunk(b"")
        except OSError:
            self.close_connection = True

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@contextmanager
def api_server() -> Iterator[FakeApiServer]:
    """One that listens."""
    server = FakeApiServer()
    server.start()
    try:
        yield server
    finally:
        if server.server is not None:
            server.stop()
