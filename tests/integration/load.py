"""Requests with a picture each, no two alike, kept coming by a few clients."""

from __future__ import annotations

import base64
import io
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
from PIL import Image

CLIENTS = 4


def picture(number: int) -> str:
    """A data URI; each number has its own picture."""
    pixels = random.Random(number).randbytes(56 * 56 * 3)
    file = io.BytesIO()
    Image.frombytes("RGB", (56, 56), pixels).save(file, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _client() -> httpx.Client:
    return httpx.Client(timeout=180)


@dataclass
class Load:
    """Asks until it is told to stop; counts answers and keeps what was no answer."""

    url: str
    connect: Callable[[], httpx.Client] = _client
    anew: bool = False
    """Each request on a connection of its own."""
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    _number: int = 0
    _open: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ending: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Starts the clients."""
        for _ in range(CLIENTS):
            self._threads.append(threading.Thread(target=self._client, daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """Returns when what was asked has been answered."""
        self._ending.set()
        for thread in self._threads:
            thread.join(180)
            assert not thread.is_alive(), "a request hangs"

    def turn_over(self) -> Callable[[], bool]:
        """Says whether all that is under way at this moment has ended."""
        with self._lock:
            before = set(self._open)
        return lambda: not before & self._open

    def _client(self) -> None:
        while not self._ending.is_set():
            with self.connect() as client:
                self._one(client)
                while not self.anew and not self._ending.is_set():
                    self._one(client)

    def _one(self, client: httpx.Client) -> None:
        with self._lock:
            self._number += 1
            number = self._number
            self._open.add(number)
        problem = self._ask(client, number)
        with self._lock:
            self._open.remove(number)
            self.answered += not problem
            if problem:
                self.failures.append(f"request {number}: {problem}")

    def _ask(self, client: httpx.Client, number: int) -> str:
        """What went wrong, if anything."""
        content = [
            {"type": "image_url", "image_url": {"url": picture(number)}},
            {"type": "text", "text": "What is in the picture?"},
        ]
        body = {"model": "demo", "messages": [{"role": "user", "content": content}]}
        body |= {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
        try:
            reply = client.post(f"{self.url}/v1/chat/completions", json=body)
        except httpx.HTTPError as error:
            return repr(error)
        if reply.status_code != 200:
            return f"{reply.status_code} {reply.text[:300]}"
        used = reply.json()["usage"]["completion_tokens"]
        return "" if used == 2 else f"{used} tokens"
