"""Request bodies to jobs: defaults, checks that need more than one field or the model, refusals."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from chiasm.errors import InvalidRequest
from chiasm.plan import Modality
from gateway.api.guides import guide_of, toolbox_of
from gateway.api.inline import Lifted
from gateway.api.openai_schema import (
    ChatBody,
    CompletionBody,
    ImageContent,
    MediaUrl,
    MessageBody,
    RefusalContent,
    SamplingBody,
    TextContent,
    ToolCallBody,
    VideoContent,
)
from gateway.messages import (
    ChatJob,
    MediaOptions,
    MediaPart,
    Message,
    RawJob,
    Role,
    Sampling,
    TextPart,
    ToolCall,
)

LOW_DETAIL = 512 * 512
COMPLETION_MAX_TOKENS = 16  # /v1/completions' default, as at OpenAI
NOTHING_LIFTED: Lifted = MappingProxyType({})
_MOST_TOKENS = 2**31 - 1

_NOT_SUPPORTED = (
    "functions",
    "function_call",
    "audio",
    "prediction",
    "web_search_options",
    "chat_template",
    "documents",
    "bad_words",
    "allowed_token_ids",
    "truncate_prompt_tokens",
    "logits_processors",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "kv_transfer_params",
    "use_beam_search",
    "prompt_logprobs",
    "suffix",
    "echo",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """What a face knows of a request beside its body."""

    request_id: str
    tenant: bytes = b""
    traceparent: str = ""
    tracestate: str = ""


def chat_job(
    body: ChatBody, caller: Caller, *, vocab_size: int, lifted: Lifted = NOTHING_LIFTED
) -> ChatJob:
    """The job of a chat request.

    Args:
        body: What was asked.
        caller: By whom.
        vocab_size: Ids that sampling may name.
        lifted: Media that some of its URLs stand for.

    Raises:
        InvalidRequest: Naming the field that cannot be obeyed.
    """
    refuse_unsupported(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    both = body.max_tokens is not None and body.max_completion_tokens is not None
    if both and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ; give one", param="max_completion_tokens"
        )
    media = body.mm_processor_kwargs
    return ChatJob(
        request_id=caller.request_id,
        model=body.model,
        messages=chat_messages(body.messages, lifted),
        sampling=_sampling(
            body,
            vocab_size,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        ),
        stop=stop_strings(body),
        tenant=caller.tenant,
        tenant_salt=salted(caller.tenant, body.cache_salt),
        priority=body.priority or 0,
        traceparent=caller.traceparent,
        tracestate=caller.tracestate,
        template_options=body.chat_template_kwargs or {},
        toolbox=toolbox_of(body),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final=_continues(body),
        include_reasoning=body.include_reasoning is not False,
        **_shape(body),
        media_options=MediaOptions(**media.model_dump()) if media else MediaOptions(),
    )


def raw_jobs(body: CompletionBody, caller: Caller, *, vocab_size: int) -> tuple[RawJob, ...]:
    """One job per prompt of a completions request.

    Raises:
        InvalidRequest: Naming the field that cannot be obeyed.
    """
    refuse_unsupported(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of other than n is not supported", param="best_of")
    sampling = _sampling(
        body,
        vocab_size,
        max_tokens=body.max_tokens or COMPLETION_MAX_TOKENS,
        top_logprobs=body.logprobs,
    )
    prompts = _prompts(body.prompt)
    return tuple(
        RawJob(
            request_id=caller.request_id if len(prompts) == 1 else f"{caller.request_id}-{index}",
            model=body.model,
            prompt=prompt,
            sampling=sampling,
            stop=stop_strings(body),
            **_shape(body),
            tenant=caller.tenant,
            tenant_salt=salted(caller.tenant, body.cache_salt),
            priority=body.priority or 0,
            traceparent=caller.traceparent,
            tracestate=caller.tracestate,
        )
        for index, prompt in enumerate(prompts)
    )


def refuse_unsupported(body: SamplingBody) -> None:
    """Refuses by name what would change the answer and is not there; empty wishes pass."""
    for name in _NOT_SUPPORTED:
        if getattr(body, name, None) not in (None, False, "", [], {}):
            raise InvalidRequest(f"{name} is not supported", param=name)
    if body.length_penalty not in (None, 1, 1.0):
        raise InvalidRequest("length_penalty is not supported", param="length_penalty")
    if getattr(body, "modalities", None) not in (None, [], ["text"]):
        raise InvalidRequest("only text is produced", param="modalities")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")


def chat_messages(
    bodies: Sequence[MessageBody], lifted: Lifted = NOTHING_LIFTED
) -> tuple[Message, ...]:
    """Turns as the pipeline takes them; raises InvalidRequest naming the turn."""
    return tuple(_message(body, f"messages[{index}]", lifted) for index, body in enumerate(bodies))


def stop_strings(body: SamplingBody) -> tuple[str, ...]:
    """`stop` as a tuple."""
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def salted(tenant: bytes, cache_salt: str | None) -> bytes:
    """What separates the caches of this request: its key, and the salt it chose."""
    if cache_salt is None:
        return tenant
    return hashlib.sha256(tenant + b"\0" + cache_salt.encode()).digest()


def _message(body: MessageBody, param: str, lifted: Lifted) -> Message:
    role = Role.SYSTEM if body.role == "developer" else Role(body.role)
    if body.tool_calls and role is not Role.ASSISTANT:
        raise InvalidRequest(f"a {role} message has no tool_calls", param=f"{param}.tool_calls")
    if body.content is None and role is not Role.ASSISTANT:
        raise InvalidRequest(f"a {role} message needs content", param=f"{param}.content")
    if body.content is None and not body.tool_calls:
        raise InvalidRequest(
            "an assistant message needs content or tool_calls", param=f"{param}.content"
        )
    return Message(
        role=role,
        parts=_parts(body.content, f"{param}.content", lifted),
        tool_calls=tuple(_call(call) for call in body.tool_calls or ()),
        name=body.name,
        tool_call_id=body.tool_call_id,
        reasoning=body.reasoning_content,
    )


def _parts(content: Any, param: str, lifted: Lifted) -> tuple[TextPart | MediaPart, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple(_part(part, f"{param}[{index}]", lifted) for index, part in enumerate(content))


def _part(part: Any, param: str, lifted: Lifted) -> TextPart | MediaPart:
    if isinstance(part, TextContent):
        return TextPart(part.text)
    if isinstance(part, RefusalContent):
        return TextPart(part.refusal)
    if isinstance(part, ImageContent):
        where, modality = part.image_url, Modality.IMAGE
    else:
        assert isinstance(part, VideoContent)
        where, modality = part.video_url, Modality.VIDEO
    url, wishes = _url(where), _wishes(part, where)
    data = lifted.get(url)
    if data is not None:
        return MediaPart(modality, data=data, param=param, options=wishes)
    return MediaPart(modality, url=url, param=param, options=wishes)


def _wishes(part: ImageContent | VideoContent, url: Any) -> MediaOptions | None:
    """Bounds on one medium; `detail: low` is OpenAI's 512 x 512."""
    inner = url if isinstance(url, MediaUrl) else None
    low = inner is not None and inner.detail == "low"
    least = part.min_pixels or (inner.min_pixels if inner else None)
    most = part.max_pixels or (inner.max_pixels if inner else None) or (LOW_DETAIL if low else None)
    if least is None and most is None:
        return None
    return MediaOptions(min_pixels=least, max_pixels=most)


def _continues(body: ChatBody) -> bool:
    """Whether the last message is to be gone on with; raises InvalidRequest where it cannot be."""
    if not body.continue_final_message:
        return False
    if body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be obeyed",
            param="continue_final_message",
        )
    if body.messages[-1].role != "assistant" or body.messages[-1].tool_calls:
        raise InvalidRequest(
            "only an assistant's text can be continued", param="continue_final_message"
        )
    return True


def _shape(body: SamplingBody) -> dict[str, Any]:
    """What both kinds of jobs say of the answer's form."""
    return {
        "include_stop": bool(body.include_stop_str_in_output),
        "skip_special": body.skip_special_tokens is not False,
        "guide": guide_of(body),
    }


def _url(value: Any) -> str:
    return value if isinstance(value, str) else str(value.url)


def _call(body: ToolCallBody) -> ToolCall:
    return ToolCall(id=body.id, name=body.function.name, arguments=body.function.arguments)


def _prompts(prompt: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt[0], int):
        return (tuple(prompt),)
    return tuple(p if isinstance(p, str) else tuple(p) for p in prompt)


def _sampling(
    body: SamplingBody, vocab_size: int, *, max_tokens: int | None, top_logprobs: int | None
) -> Sampling:
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise InvalidRequest("min_tokens is above max_tokens", param="min_tokens")
    for index, token_id in enumerate(body.stop_token_ids or ()):
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"token id {token_id} is not in [0, {vocab_size})", param=f"stop_token_ids[{index}]"
            )
    return Sampling(
        max_tokens=None if max_tokens is None else min(max_tokens, _MOST_TOKENS),
        min_tokens=min(body.min_tokens or 0, _MOST_TOKENS),
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        seed=None if body.seed is None else body.seed % 2**64,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        n=body.n or 1,
        top_logprobs=top_logprobs,
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _logit_bias(wanted: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    found = []
    for key, bias in wanted.items():
        param = f"logit_bias.{key[:20]}"
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
            raise InvalidRequest(f"not a token id in [0, {vocab_size})", param=param)
        if not -100 <= bias <= 100:
            raise InvalidRequest("a bias must be in [-100, 100]", param=param)
        found.append((int(key), float(bias)))
    return tuple(found)
