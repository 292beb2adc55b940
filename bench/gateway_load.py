"""Load for `bench.gateway`: chat requests over HTTP, and the same job straight to the services."""

from __future__ import annotations

import asyncio
import base64
import io
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
import grpc
import orjson
from PIL import Image

from chiasm.checkpoint import resolve_model
from chiasm.plan import Modality, Part, Promise, Source, Span
from chiasm.v1 import decoder_pb2, decoder_pb2_grpc, encoder_pb2, encoder_pb2_grpc
from gateway.media.header import read_header
from gateway.media.intake import Medium
from gateway.messages import MediaOptions, MediaPart
from gateway.planning import Keys, Planner, planner_for, seal

PICTURE_BYTES = 1_000_000
_CHUNK_BYTES = 1 << 20
_PROMPT_TOKENS = 300

Job = Callable[[int], Awaitable[float]]
"""Runs the n-th request; returns the seconds to its first token."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What a closed loop saw."""

    first_s: tuple[float, ...]
    whole_s: tuple[float, ...]
    seconds: float


def pictures(count: int) -> list[bytes]:
    """Different JPEG files of about a megabyte each."""
    noise = random.Random(1).randbytes(1100 * 900 * 3)
    file = io.BytesIO()
    Image.frombytes("RGB", (1100, 900), noise).save(file, "JPEG", quality=90)
    data = file.getvalue()
    assert abs(len(data) - PICTURE_BYTES) < PICTURE_BYTES // 5, len(data)
    return [data + b"%08d" % number for number in range(count)]  # bytes behind the end: ignored


def body(picture: bytes | None, *, tokens: int, stream: bool) -> bytes:
    """A chat request, ready to send."""
    content: list[dict[str, object]] = [{"type": "text", "text": "What is this? Name it."}]
    if picture is not None:
        url = "data:image/jpeg;base64," + base64.b64encode(picture).decode()
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return orjson.dumps(
        {
            "model": "demo",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": tokens,
            "stream": stream,
        }
    )


async def closed_loop(job: Job, *, clients: int, requests: int) -> Answered:
    """So many requests in all, by clients that send the next one when the last is answered."""
    numbers = iter(range(requests))
    first: list[float] = []
    whole: list[float] = []

    async def client() -> None:
        for number in numbers:
            began = time.perf_counter()
            first.append(await job(number))
            whole.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return Answered(tuple(first), tuple(whole), time.perf_counter() - began)


class HttpJob:
    """Posts bodies to a chat endpoint and reads all of every answer.

    Args:
        session: Shared by all clients.
        url: Of the endpoint.
        bodies: Used in turn.
        key: Bearer key; empty = none.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, bodies: Sequence[bytes], key: str = ""
    ) -> None:
        self._session = session
        self._url = url
        self._bodies = bodies
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    async def __call__(self, number: int) -> float:
        """One request."""
        body = self._bodies[number % len(self._bodies)]
        began = time.perf_counter()
        first = 0.0
        async with self._session.post(self._url, data=body, headers=self._headers) as answer:
            assert answer.status == 200, await answer.text()
            tail = b""
            async for piece in answer.content.iter_any():
                first = first or time.perf_counter() - began
                tail = (tail + piece)[-64:]
            assert b"[DONE]" in tail or tail.rstrip().endswith(b"}"), tail
        return first


@dataclass(slots=True)
class DirectJob:
    """The least anybody could do: both calls to the services, planned beforehand, nothing read.

    Args:
        encoder: Channel to the encoder.
        decoder: Channel to the decoder.
        media: Sent in turn.
        tokens: Asked for.
        address: The encoder's.
    """

    encoder: grpc.aio.Channel
    decoder: grpc.aio.Channel
    media: Sequence[bytes]
    tokens: int
    address: str
    _planner: Planner = field(default_factory=lambda: planner_for(resolve_model("demo")))

    async def __call__(self, number: int) -> float:
        """One request."""
        data = self.media[number % len(self.media)]
        encode_id = secrets.token_bytes(16)
        plan = self._plan(data)
        part = Part(
            part=0,
            rows=Span(0, plan.num_rows),
            source=Source(encode_id, self.address, 0),
            frames=None,
            attempt=1,
        )
        start = decoder_pb2.GenerateStart(
            prompt_token_ids=[97] * (_PROMPT_TOKENS + plan.num_rows),
            promises=[Promise(0, plan, 0, (part,)).to_proto()],
            sampling=decoder_pb2.SamplingParams(max_tokens=self.tokens, n=1),
        )
        began = time.perf_counter()
        encode = asyncio.create_task(self._encode(encode_id, plan.to_proto(), data))
        call = decoder_pb2_grpc.DecoderStub(self.decoder).Generate()
        await call.write(decoder_pb2.GenerateRequest(start=start))
        first = 0.0
        async for message in call:
            if message.WhichOneof("kind") == "tokens" and not first:
                await encode  # an answer begins when its picture is known to be one
                first = time.perf_counter() - began
        return first

    async def _encode(self, encode_id: bytes, plan: object, data: bytes) -> None:
        call = encoder_pb2_grpc.EncoderStub(self.encoder).Encode()
        start = encoder_pb2.EncodeStart(encode_id=encode_id, plan=plan)  # type: ignore[arg-type]
        await call.write(encoder_pb2.EncodeRequest(start=start))
        async for message in call:
            kind = message.WhichOneof("kind")
            if kind == "accepted":
                for at in range(0, len(data), _CHUNK_BYTES):
                    chunk = data[at : at + _CHUNK_BYTES]
                    await call.write(encoder_pb2.EncodeRequest(chunk=chunk))
            elif kind == "done":
                await call.done_writing()

    def _plan(self, data: bytes):
        header = read_header(data, Modality.IMAGE, max_pixels=1 << 30, param="")
        layout = self._planner.plan(header, MediaOptions(), param="")
        medium = Medium(MediaPart(Modality.IMAGE, data=data), data, bytes(32), header)
        return seal(layout, medium, Keys(tower=b"tower", processor=b"", salt=b""))
