"""Lets an API server of Kubernetes 1.20, the newest that can be built here, pass for one of 1.30.

A reverse proxy: what differs between the two in what the chart and the gateway use is rewritten on
the way in, and back on the way out.

| 1.30 | 1.20 |
|---|---|
| policy/v1, discovery.k8s.io/v1, autoscaling/v2 | betas, whose objects have the same fields |
| `unhealthyPodEvictionPolicy` | not known: left out |
| probes by gRPC | not known: by TCP, same port |
| `preStop.sleep` | not known: `sleep` in the container |

The left-hand forms are validated against Kubernetes' own schemas in tests/deploy.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

VERSION = {"major": "1", "minor": "30", "gitVersion": "v1.30.0"}
# openapi.v2.Document {swagger: "2.0", info {title: "-", version: "-"}, paths {}}: tells of no
# kind, so that helm leaves it to the server to refuse what is wrong.
NO_OPENAPI = bytes.fromhex("0a03322e3012060a012d12012d4200")
_OLDER = {"policy/v1": "v1beta1", "discovery.k8s.io/v1": "v1beta1", "autoscaling/v2": "v2beta2"}
_GROUPS = {name.partition("/")[0] for name in _OLDER}
_HOP = {"connection", "transfer-encoding", "content-length", "host", "accept", "accept-encoding"}


def older(node: Any) -> Any:
    """An object as 1.20 knows it."""
    if isinstance(node, list):
        return [older(item) for item in node]
    if not isinstance(node, dict):
        return node
    result = {key: older(value) for key, value in node.items()}
    if (name := str(result.get("apiVersion", ""))) in _OLDER:
        result["apiVersion"] = f"{name.partition('/')[0]}/{_OLDER[name]}"
    if result.get("kind") == "PodDisruptionBudget":
        result["spec"].pop("unhealthyPodEvictionPolicy", None)
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        if grpc := (result.get(name) or {}).pop("grpc", None):
            result[name]["tcpSocket"] = {"port": grpc["port"]}
    hook = result.get("preStop")
    if isinstance(hook, dict) and "sleep" in hook:
        result["preStop"] = {"exec": {"command": ["sleep", str(hook["sleep"]["seconds"])]}}
    return result


def newer(path: str, body: bytes) -> bytes:
    """An answer as 1.30 would give it."""
    if path == "/version":
        return json.dumps(json.loads(body) | VERSION).encode()
    for name, version in _OLDER.items():
        beta = f"{name.partition('/')[0]}/{version}"
        body = body.replace(f'"{beta}"'.encode(), f'"{name}"'.encode())
    if path not in ("/apis", *(f"/apis/{group}" for group in _GROUPS)):
        return body
    found = json.loads(body)
    for group in found.get("groups", [found]):
        if group.get("name") in _GROUPS:
            for entry in (*group["versions"], group["preferredVersion"]):
                entry["version"] = entry["groupVersion"].partition("/")[2]
    return json.dumps(found).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream: str
    context: ssl.SSLContext

    def _forward(self) -> None:
        if self.path.startswith("/openapi/v2"):
            self.send_response(200)
            kind = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(NO_OPENAPI)))
            self.end_headers()
            self.wfile.write(NO_OPENAPI)
            return
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length) if length else None
        path = self.path
        for name, version in _OLDER.items():
            beta = f"/apis/{name.partition('/')[0]}/{version}"
            path = re.sub(rf"^/apis/{re.escape(name)}(?![a-z0-9])", beta, path)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
        # Helm keeps its releases in protobuf; secrets are the same in both.
        as_it_is = "protobuf" in self.headers.get("content-type", "")
        headers["accept"] = self.headers["accept"] if as_it_is else "application/json"
        if body is not None and not as_it_is:
            headers.setdefault("content-type", "application/json")
            body = json.dumps(older(yaml.safe_load(body))).encode()
        connection = http.client.HTTPSConnection(self.upstream, context=self.context, timeout=90)
        try:
            connection.request(self.command, path, body, headers)
            self._answer(connection.getresponse())
        except OSError:
            self.close_connection = True  # as if there were no proxy: the connection breaks
        finally:
            connection.close()

    def _answer(self, response: http.client.HTTPResponse) -> None:
        path = urlsplit(self.path).path
        self.send_response(response.status)
        for key, value in response.getheaders():
            if key.lower() not in _HOP:
                self.send_header(key, value)
        if response.getheader("transfer-encoding") == "chunked" and "watch=" in self.path:
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for line in response:
                self._chunk(newer(path, line))
            self._chunk(b"")
            return
        body = newer(path, response.read())
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _forward

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go in the middle of something are no news."""


@contextmanager
def translated(url: str, certificate: Path, key: Path) -> Iterator[str]:
    """The address of a proxy before the API server at `url`; it outlives the server's restarts.

    It shows the server's own certificate: clients send no token where there is none.
    """
    context = ssl.create_default_context(cafile=str(certificate))
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(certificate, key)
    upstream = urlsplit(url).netloc
    handler = type("Handler", (_Handler,), {"upstream": upstream, "context": context})
    server = _Quiet(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.socket = own.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )  # hands are shaken in the connection's thread
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
