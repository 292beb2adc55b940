"""Where the ranks of other hosts come in: the engine's port, a shared secret, one channel per rank.

Who knows the secret is trusted to be a rank; frames are plain values, so that is all it can be. The
groups' own traffic (gloo, NCCL and their store) is neither authenticated nor encrypted: the hosts
of one decoder belong on a network of their own.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from chiasm.errors import Unavailable
from decoder_svc.parallel.launch import Rendezvous, serve_store
from decoder_svc.runner.codec import Hello, decode, encode
from decoder_svc.runner.group import Member

logger = logging.getLogger(__name__)

_LEAST_TOKEN_BYTES = 16
_GONE_MS = 30_000


class RankHub:
    """Takes connections in, in a thread; the newest of a rank is the one that counts.

    Args:
        rendezvous: Where to listen: only at the address that ranks are told.
        token: The secret.
        ranks: Those that are to come.

    Raises:
        Unavailable: Nobody can listen at that address.
    """

    def __init__(self, rendezvous: Rendezvous, token: bytes, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._come: dict[int, Connection] = {}
        self._lock = threading.Lock()
        address = (rendezvous.host, rendezvous.port)
        try:
            self._listener = Listener(address, backlog=len(self._ranks), authkey=token)
            self._store = serve_store(rendezvous)  # lives as long as this does
        except OSError as error:
            raise Unavailable(f"cannot take ranks in at {address}: {error.strerror}") from None
        self._closed = False
        threading.Thread(target=self._accept, name="rank-hub", daemon=True).start()

    def take(self) -> list[Member]:
        """All ranks of other hosts, once all have come; until then none."""
        with self._lock:
            if self._come.keys() < set(self._ranks):
                return []
            come, self._come = self._come, {}
        return [Member(rank, come[rank], None) for rank in self._ranks]

    def close(self) -> None:
        """Takes nobody in any more; those who wait are sent away."""
        self._closed = True
        self._listener.close()
        with self._lock:
            for channel in self._come.values():
                channel.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                channel = self._listener.accept()
                hello = decode(channel.recv_bytes())
            except (OSError, EOFError, ValueError, AuthenticationError) as error:
                if not self._closed:
                    logger.warning("somebody who is no rank has called: %s", error)
                continue
            if not isinstance(hello, Hello) or hello.rank not in self._ranks:
                channel.close()
                continue
            tune(channel)
            with self._lock:
                before = self._come.pop(hello.rank, None)
                self._come[hello.rank] = channel
            if before is not None:
                before.close()


def dial(rendezvous: Rendezvous, token: bytes, rank: int) -> Connection:
    """A rank's channel to the engine. Raises OSError or AuthenticationError."""
    channel = Client((rendezvous.host, rendezvous.port), authkey=token)
    tune(channel)
    channel.send_bytes(encode(Hello(rank)))
    return channel


def read_token(path: str) -> bytes:
    """The secret. Raises ValueError when there is none, or hardly any."""
    if not path:
        raise ValueError("several hosts need --rank-token-file")
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"--rank-token-file {path}: {error.strerror}") from None
    if len(token) < _LEAST_TOKEN_BYTES:
        raise ValueError(f"--rank-token-file must hold at least {_LEAST_TOKEN_BYTES} bytes")
    return token


def tune(channel: Connection) -> None:
    """Small frames leave at once; a host that has vanished is noticed."""
    with socket.fromfd(channel.fileno(), socket.AF_INET, socket.SOCK_STREAM) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_MS)
