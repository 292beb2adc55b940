"""No body, however odd, makes a 500 or another shape of error."""

from __future__ import annotations

import asyncio

import httpx
import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.openai_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.unit.gateway_face.scripted import ScriptedPipeline, chat, client_of, make_face

ROUTES = {
    "/v1/chat/completions": (ChatBody, chat()),
    "/v1/completions": (CompletionBody, {"model": "demo", "prompt": "x"}),
    "/tokenize": (TokenizeBody, {"prompt": "x"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1]}),
}
WORDS = st.sampled_from(
    ["", "x", "user", "assistant", "tool", "text", "image_url", "type", "url", "role", "content"]
    + ["tool_calls", "function", "name", "arguments", "<|im_end|>", "\ufdd0", "\x00", "é"]
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), WORDS
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=4)),
    max_leaves=12,
)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "video_url", "refusal", "audio"])},
    optional={"text": VALUES, "image_url": VALUES, "video_url": VALUES, "refusal": VALUES},
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"])},
        optional={"content": st.one_of(VALUES, st.lists(PARTS, max_size=3)), "tool_calls": VALUES},
    ),
    max_size=3,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, object]]:
    url = draw(st.sampled_from(sorted(ROUTES)))
    model, base = ROUTES[url]
    names = st.sampled_from(sorted(model.model_fields))
    fields = draw(st.dictionaries(names, VALUES, max_size=4))
    if draw(st.booleans()) and "messages" in model.model_fields:
        fields["messages"] = draw(MESSAGES)
    return url, {**base, **fields}


@given(st.lists(requests(), min_size=1, max_size=10))
@settings(max_examples=30, deadline=None)
def test_odd_bodies_are_answered_or_refused_in_shape(
    bodies: list[tuple[str, dict[str, object]]],
) -> None:
    async def send_all() -> list[httpx.Response]:
        async with client_of(make_face(ScriptedPipeline())) as client:
            headers = {"content-type": "application/json"}
            return [
                await client.post(url, content=orjson.dumps(body), headers=headers)
                for url, body in bodies
            ]

    for answer in asyncio.run(send_all()):
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
