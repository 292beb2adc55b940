"""`python -I -m chiasm.probe`: whether the service of this container is well, asked on its port.

For who asks from outside and has no certificate: kubelet, by an exec probe, and docker, by
HEALTHCHECK. It starts every few seconds in every container, so it imports nothing but ssl and
socket; gRPC health it asks by the few HTTP/2 frames that this takes.

    python -I -m chiasm.probe encoder                  # as CHIASM_PORT and CHIASM_TLS_* say
    python -I -m chiasm.probe https://127.0.0.1:8000/ready CERTIFICATE KEY
    python -I -m chiasm.probe grpcs://127.0.0.1:50051/live CERTIFICATE KEY
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
import time
from collections.abc import Mapping

LIVE = "live"  # health of this name is false only for what a new process heals

_TIMEOUT_S = 4.0
_SERVING = b"\x08\x01"  # HealthCheckResponse(status=SERVING)
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1


def is_well(url: str, pair: tuple[str, str] | None = None) -> bool:
    """Asks on this host. Nobody answering, or another answer, is not well.

    Args:
        url: http[s]://HOST:PORT/PATH, well with a status of 200, or grpc[s]://HOST:PORT/SERVICE,
            well while its health is SERVING.
        pair: Certificate and key to show, with https and grpcs. Whose certificate the other shows
            is not looked at: it is this container itself, and it is told nothing.
    """
    scheme, _, rest = url.partition("://")
    authority, _, path = rest.partition("/")
    host, _, port = authority.rpartition(":")
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S) as plain:
            connection = plain if scheme in ("http", "grpc") else _secured(plain, scheme, pair)
            with connection:
                if scheme.startswith("grpc"):
                    return _Health(connection, authority, deadline).status(path) == _SERVING
                connection.sendall(f"GET /{path} HTTP/1.0\r\nhost: {authority}\r\n\r\n".encode())
                return connection.recv(64).split(b" ", 2)[1:2] == [b"200"]
    except (OSError, EOFError):  # ssl's errors are OSErrors
        return False


def _secured(plain: socket.socket, scheme: str, pair: tuple[str, str] | None) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if pair is not None:
        context.load_cert_chain(*pair)
    if scheme == "grpcs":
        context.set_alpn_protocols(["h2"])
    return context.wrap_socket(plain)


class _Health:
    """One call of grpc.health.v1.Health/Check on a fresh connection (RFC 9113, RFC 7541)."""

    def __init__(self, connection: socket.socket, authority: str, deadline: float) -> None:
        self._connection = connection
        self._authority = authority
        self._deadline = deadline

    def status(self, service: str) -> bytes:
        """The answer's bytes; empty: an error."""
        name = service.encode()
        message = b"\x0a" + bytes([len(name)]) + name if name else b""
        call = b"\0" + len(message).to_bytes(4, "big") + message
        self._connection.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + _frame(_SETTINGS, 0, 0, b"")
            + _frame(_HEADERS, _END_HEADERS, 1, self._head())
            + _frame(_DATA, _END_STREAM, 1, call)
        )
        answer = b""
        while True:
            kind, flags, payload = self._read_frame()
            if kind == _DATA:
                answer += payload
                if len(answer) >= 5 and len(answer) >= 5 + int.from_bytes(answer[1:5], "big"):
                    return answer[5:]
            elif kind in (_SETTINGS, _PING) and not flags & _ACK:
                reply = payload if kind == _PING else b""
                self._connection.sendall(_frame(kind, _ACK, 0, reply))
            elif kind in (_RESET, _GOAWAY) or (kind == _HEADERS and flags & _END_STREAM):
                return b""

    def _head(self) -> bytes:
        """By the static table where it has a name, never Huffman coded, nothing remembered."""
        return (
            b"\x83\x87\x04"  # :method POST, :scheme https, :path
            + _text("/grpc.health.v1.Health/Check")
            + b"\x01"  # :authority
            + _text(self._authority)
            + b"\x0f\x10"  # content-type
            + _text("application/grpc")
            + b"\x00"
            + _text("te")
            + _text("trailers")
        )

    def _read_frame(self) -> tuple[int, int, bytes]:
        head = self._read(9)
        return head[3], head[4], self._read(int.from_bytes(head[:3], "big"))

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            self._connection.settimeout(max(0.001, self._deadline - time.monotonic()))
            piece = self._connection.recv(count - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


def _text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()


def is_live(role: str, env: Mapping[str, str]) -> bool:
    """Whether a service that was set up by these variables lives; one that loads does not yet.

    Args:
        role: gateway, or another: encoders and decoders are asked alike.
        env: CHIASM_PORT, and CHIASM_TLS_CERT_FILE and CHIASM_TLS_KEY_FILE where it has TLS; of a
            gateway with a door of its own CHIASM_FRONT_*.
    """
    address = f"127.0.0.1:{env.get('CHIASM_PORT', '8000')}"
    pair = (env.get("CHIASM_TLS_CERT_FILE", ""), env.get("CHIASM_TLS_KEY_FILE", ""))
    if role == "gateway":
        own = (env.get("CHIASM_FRONT_CERT_FILE", ""), env.get("CHIASM_FRONT_KEY_FILE", ""))
        pair = own if all(own) else pair
        if env.get("CHIASM_FRONT_DOOR") == "plain":
            pair = ("", "")
    secured = "s" if all(pair) else ""
    scheme, path = ("http", "health") if role == "gateway" else ("grpc", LIVE)
    return is_well(f"{scheme}{secured}://{address}/{path}", pair if secured else None)


def _main(arguments: list[str]) -> int:
    what, *files = arguments
    if "://" not in what:
        return 0 if is_live(what, os.environ) else 1
    return 0 if is_well(what, (files[0], files[1]) if files else None) else 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
