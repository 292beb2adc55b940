"""A deployment in which everything has TLS, and who knocks at its ports."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import httpx

from tests.integration.certificates import NAME, Authority, Identity
from tests.integration.cluster import PATIENCE_S, Cluster, free_port
from tests.integration.ports import Port, listening
from tests.integration.stack import Service, Stack

STRANGERS = ("nothing", "plain text", "another CA", "expired")
HTTP1 = b"GET /metrics HTTP/1.0\r\n\r\n"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
OPEN = ("--host", "0.0.0.0", "--advertise-host", "127.0.0.1")  # as in a pod
ANSWER_S = 30.0  # who says nothing for so long has refused
_ALERT = 21  # a record of TLS that says no


class Secured:
    """An encoder of two workers, a decoder of two ranks, a gateway, and one of two workers."""

    def __init__(self, directory: Path) -> None:
        self.ours, self.theirs = Authority(directory / "ours"), Authority(directory / "theirs")
        roles = ("encoder_svc", "decoder_svc", "gateway", "user")
        self.identities = {role: self.ours.issue(role) for role in roles}
        self.metrics = {role: free_port() for role in roles}
        self.stack = Stack("demo")
        self.encoder = self.start("encoder_svc", "--dp-size", "2", "--transport", "grpc")
        self.decoder = self.start("decoder_svc", "--pp-size", "2", "--transport", "grpc")
        peers = ("--encoder-urls", local(self.encoder.wait_ready().address))
        peers += ("--decoder-urls", local(self.decoder.wait_ready().address))
        self.gateway = self.start("gateway", *peers).wait_ready()
        several = ("--workers", "2", "--metrics-port", str(free_port()))
        self.several = self.start("gateway", *peers, *several).wait_ready()
        self.url = f"https://{local(self.gateway.address)}"
        self.until_in_use()

    @property
    def services(self) -> tuple[Service, ...]:
        return self.encoder, self.decoder, self.gateway, self.several

    def start(self, role: str, *flags: str) -> Service:
        """With its certificate, on all addresses of the machine."""
        tls = self.identities[role].flags
        if "--metrics-port" not in flags:
            flags = (*flags, "--metrics-port", str(self.metrics[role]))
        return self.stack.start(role, *OPEN, *flags, *tls)

    def restart(self, service: Service, *flags: str) -> Service:
        """The same at the same port, with its files as they are now."""
        service.process.terminate()
        assert service.process.wait(PATIENCE_S) == 0
        port = service.address.rpartition(":")[2]
        return self.start(service.name, *flags, "--port", port).wait_ready()

    def ports(self) -> set[Port]:
        """All that anybody can reach from outside, or only from this machine."""
        return {port for service in self.services for port in listening(service.process.pid)}

    def until_in_use(self) -> None:
        """Waits until both gateways use all four: each of several workers, as ten in a row say."""
        for gateway, times in ((self.gateway, 1), (self.several, 10)):
            url = f"https://{local(gateway.address)}/ready"
            for _ in range(times):
                Cluster.until(lambda url=url: self._num_ready(url) == 4)  # type: ignore[misc]

    def _num_ready(self, url: str) -> int:
        """By a connection of its own."""
        with self.user() as user:
            endpoints = user.get(url).json()["endpoints"]
        return sum(endpoint["ready"] for endpoint in endpoints)

    def user(self, identity: Identity | None = None) -> httpx.Client:
        """A client with a certificate; it knows services by the name that theirs holds."""
        shown = identity or self.identities["user"]
        deadline = time.monotonic() + PATIENCE_S
        while True:
            context = ssl.create_default_context(cafile=str(shown.ca))
            context.check_hostname = False
            try:
                context.load_cert_chain(shown.certificate, shown.key)
                break
            except ssl.SSLError:  # they are just being replaced, one after the other
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        return httpx.Client(verify=context, timeout=180)

    def identity_of(self, who: str) -> Identity | None:
        """What a client shows; it believes in the services' CA in any case."""
        if who == "another CA":
            return replace(self.theirs.issue("stranger"), ca=self.ours.certificate)
        if who == "expired":
            return self.ours.issue("expired", days=-1)
        return self.ours.issue("friend") if who == "friend" else None

    def answer(self, port: int, who: str) -> bytes:
        """What a port says to who knocks, by HTTP/2 if it likes, else HTTP/1; empty: refused."""
        try:
            with ExitStack() as opened:
                stream = opened.enter_context(
                    socket.create_connection(("127.0.0.1", port), ANSWER_S)
                )
                if who == "plain text":
                    return self._plain(stream, HTTP1) + self._plain_again(port)
                context = ssl.create_default_context(cafile=str(self.ours.certificate))
                context.set_alpn_protocols(["h2", "http/1.1"])
                if shown := self.identity_of(who):
                    context.load_cert_chain(shown.certificate, shown.key)
                secure = context.wrap_socket(stream, server_hostname=NAME)
                secure = opened.enter_context(secure)
                secure.sendall(HTTP2 if secure.selected_alpn_protocol() == "h2" else HTTP1)
                return secure.recv(100)
        except OSError:
            return b""

    def _plain_again(self, port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), ANSWER_S) as stream:
            return self._plain(stream, HTTP2)

    @staticmethod
    def _plain(stream: socket.socket, greeting: bytes) -> bytes:
        try:
            stream.sendall(greeting)
            said = stream.recv(100)
        except OSError:
            return b""
        return b"" if said[:1] == bytes([_ALERT]) else said


def local(address: str) -> str:
    """How this machine reaches what listens on all addresses."""
    return f"127.0.0.1:{address.rpartition(':')[2]}"
