"""Everything that is not inference: models, tokenizer, health, readiness, metrics, docs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from chiasm.errors import InvalidRequest, ModelNotFound, Unauthenticated
from gateway.api.answer import face_of
from gateway.api.body import read_body
from gateway.api.face import Face
from gateway.api.guides import tool_of
from gateway.api.jobs import chat_messages
from gateway.api.openai_schema import DetokenizeBody, TokenizeBody
from gateway.api.openapi import docs_page, takes
from gateway.messages import MediaPart, ServedModel
from gateway.turns import TurnForm

router = APIRouter()
_CSP = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)


@router.get("/v1/models", tags=["OpenAI"])
async def list_models(request: Request) -> Response:
    """Exactly the names that requests may use."""
    data = [_model(model) for model in face_of(request).pipeline.models()]
    return _json({"object": "list", "data": data})


@router.get("/v1/models/{model_id:path}", tags=["OpenAI"])
async def get_model(request: Request, model_id: str) -> Response:
    """One of them."""
    return _json(_model(_find(face_of(request), model_id)))


@router.post("/tokenize", openapi_extra=takes(TokenizeBody), tags=["Tokenizer"])
async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of messages without media as the chat template renders them."""
    face = face_of(request)
    body = await read_body(request, TokenizeBody, max_bytes=face.max_body_bytes)
    model = _find(face, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    ids = await asyncio.to_thread(_encode, face, body)
    answer = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
    if body.return_token_strs:
        spell = face.prompts.vocabulary.bytes_of
        answer["token_strs"] = [spell(token_id).decode("utf-8", "replace") for token_id in ids]
    return _json(answer)


@router.post("/detokenize", openapi_extra=takes(DetokenizeBody), tags=["Tokenizer"])
async def detokenize(request: Request) -> Response:
    """Text of token ids, special tokens by name."""
    face = face_of(request)
    body = await read_body(request, DetokenizeBody, max_bytes=face.max_body_bytes)
    _find(face, body.model)
    for index, token_id in enumerate(body.tokens):
        if token_id >= face.vocab_size:
            raise InvalidRequest(
                f"token id {token_id} is not in [0, {face.vocab_size})", param=f"tokens[{index}]"
            )
    return _json({"prompt": face.prompts.vocabulary.decode(body.tokens, skip_special=False)})


@router.get("/health", tags=["Operations"])
async def health() -> Response:
    """200 while the process lives and its event loop turns."""
    return _json({"status": "ok"})


@router.get("/ready", tags=["Operations"])
async def ready(request: Request) -> Response:
    """200 when text can be served, else 503; `images` says whether pictures can be as well.

    Open to all; where keys are asked for, only who has one sees the endpoints.
    """
    face = face_of(request)
    state = face.pipeline.readiness()
    draining = request.app.state.gate.draining
    serving = state.text and not draining
    body: dict[str, Any] = {
        "ready": serving,
        "text": state.text,
        "images": state.images,
        "draining": draining,
    }
    with suppress(Unauthenticated):
        face.keys.tenant(request.headers.getlist("authorization"))
        body["endpoints"] = list(state.endpoints)
    return _json(body, status=200 if serving else 503)


@router.get("/metrics", tags=["Operations"], response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus metrics of this gateway."""
    text = await face_of(request).metrics_page()
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    """The API's description, for people."""
    headers = {"content-security-policy": _CSP}
    return Response(docs_page(), media_type="text/html", headers=headers)


def _encode(face: Face, body: TokenizeBody) -> Sequence[int]:
    if body.prompt is not None:
        return face.prompts.encode_text(body.prompt, parse_special=body.parse_special)
    messages = chat_messages(body.messages or ())
    if any(isinstance(part, MediaPart) for message in messages for part in message.parts):
        raise InvalidRequest("media cannot be tokenized here", param="messages")
    tools = [tool_of(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
    form = TurnForm(
        options=body.chat_template_kwargs or {},
        tools=tuple(tools),
        add_generation_prompt=body.add_generation_prompt,
        continue_final=body.continue_final_message,
    )
    return face.prompts.render(messages, form=form).token_ids


def _find(face: Face, model_id: str | None) -> ServedModel:
    models = face.pipeline.models()
    for model in models:
        if model_id is None or model.id == model_id:
            return model
    raise ModelNotFound(f"the model {model_id!r} is not served here", param="model")


def _model(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "chiasm",
        "max_model_len": model.max_model_len,
    }


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")
