"""Media taken out of a body's text: whoever asks gets the job that the whole text asks for."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import pytest

from chiasm.errors import InvalidRequest
from gateway.api.body import parse, parse_chat
from gateway.api.inline import LEAST_CHARS, lift
from gateway.api.jobs import Caller, chat_job
from gateway.api.openai_schema import ChatBody
from gateway.media.data_uri import parse_data_uri
from gateway.messages import ChatJob, MediaPart

PICTURE = random.Random(1).randbytes(LEAST_CHARS)
URI = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
CALLER = Caller(request_id="r1")


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url}


def chat(*parts: Any, **fields: Any) -> bytes:
    body = {"model": "demo", "messages": [{"role": "user", "content": list(parts)}], **fields}
    return json.dumps(body).encode()


def job_of(raw: bytes, *, whole: bool) -> ChatJob:
    body, lifted = (parse(raw, ChatBody), {}) if whole else parse_chat(raw)
    return chat_job(body, CALLER, vocab_size=1000, lifted=lifted)


def plain(job: ChatJob) -> list[Any]:
    """Its parts, with the bytes of every medium."""
    parts: list[Any] = []
    for part in (part for message in job.messages for part in message.parts):
        if isinstance(part, MediaPart):
            data = part.data
            if data is None:
                data = parse_data_uri(part.url or "", max_bytes=1 << 30, param="")
            parts.append((part.modality, data, part.param, part.options))
        else:
            parts.append(part)
    return parts


TEXT = {"type": "text", "text": "what?"}
TALK = {"type": "text", "text": f'he said "{URI}" to me'}
BODIES = {
    "a picture": (chat(TEXT, image({"url": URI})), 1),
    "without an object": (chat(image(URI), TEXT), 1),
    "low detail": (chat(image({"url": URI, "detail": "low"})), 1),
    "the same twice": (chat(image({"url": URI}), image({"url": URI})), 2),
    "spread out": (json.dumps(json.loads(chat(image({"url": URI}))), indent=3).encode(), 1),
    "a clip": (chat({"type": "video_url", "video_url": {"url": URI}}), 1),
    "too short": (chat(image({"url": URI[:400]})), 0),
    "without padding": (chat(image({"url": URI.rstrip("=") + "A"})), 0),
    "URL-safe": (chat(image({"url": URI.replace("/", "_").replace("+", "-")})), 0),
    "blanks": (chat(image({"url": URI[:5000] + " " + URI[5000:]})), 0),
    "escaped slashes": (chat(image({"url": URI})).replace(b"/", b"\\/"), 0),
    "in a text": (chat({"type": "text", "text": URI}), 0),
    "quoted in a text": (chat(TALK), 0),
    "beside a text": (chat({**TEXT, "image_url": {"url": URI}}), 0),
    "in a picture and in a text": (chat({"type": "text", "text": URI}, image(URI)), 0),
    "in a field nobody knows": (chat(image({"url": URI}), metadata={"url": URI}), 0),
    "behind many of the kind": (chat(*[{**TEXT, "text": "data:"}] * 1024, image(URI)), 0),
    "as a key": (chat(TEXT, metadata={URI: 1}), 0),
}


@pytest.mark.parametrize("raw, lifted", BODIES.values(), ids=BODIES)
def test_the_job_is_the_same(raw: bytes, lifted: int) -> None:
    assert len(parse_chat(raw)[1]) == lifted
    assert plain(job_of(raw, whole=False)) == plain(job_of(raw, whole=True))


BROKEN = {
    "no JSON": chat(image({"url": URI}))[:-1],
    "a control character": chat(image({"url": URI})).replace(b"base64,", b"base64,\n"),
    "no end": chat(image({"url": URI}))[:3000],
    "a wrong field": chat(image({"url": URI}), temperature="hot"),
    "a wrong part": chat(image({"url": URI, "detail": 7})),
    "no messages": json.dumps({"model": "demo", "x": image(URI)}).encode(),
}


@pytest.mark.parametrize("raw", BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_is_said_in_the_same_words(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as whole:
        parse(raw, ChatBody)
    with pytest.raises(InvalidRequest) as short:
        parse_chat(raw)
    assert (short.value.message, short.value.param) == (whole.value.message, whole.value.param)


def test_what_stands_for_a_medium_cannot_be_guessed() -> None:
    names = {name for _ in range(2) for name in lift(chat(image(URI)))[1]}
    assert len(names) == 2
