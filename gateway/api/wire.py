"""OpenAI's response shapes: whole answers, and stream chunks from a prebuilt envelope.

One object per request. A chunk costs one JSON string per delta; the rest is encoded once.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from gateway.messages import CallDelta, Delta, FinishReason, JobDone, TokenLogprob, Usage

BytesOf = Callable[[int], bytes]

DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0  # JSON has no -Infinity


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an answer says about itself, and which extras were asked for."""

    id: str
    model: str
    bytes_of: BytesOf
    logprobs: bool = False
    usage: bool = True
    """In streams: whether the usage chunk was asked for."""
    running: bool = False
    """In streams: whether every chunk says how many tokens there are so far."""
    timings: bool = False
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(slots=True)
class Choice:
    """One choice of a whole answer, as it grows."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason | None = None
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def take(self, delta: Delta) -> None:
        """One more delta."""
        self.text.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        for call in delta.calls:
            if call.id:
                self.calls.append(
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": ""},
                    }
                )
            self.calls[call.index]["function"]["arguments"] += call.arguments


class Wire(ABC):
    """What both endpoints' shapes have in common."""

    whole_object = ""
    chunk_object = ""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        head = orjson.dumps(self._head(self.chunk_object))[:-1]
        self._before = b"data: " + head + b',"choices":[{"index":'
        self._no_choices = b"data: " + head + b',"choices":[]'
        self._after = (b'}],"usage":null' if reply.usage else b"}]") + b"}\n\n"
        self._so_far = Usage(0, 0)

    def whole(self, choices: Sequence[Choice], done: JobDone) -> bytes:
        """A whole answer."""
        body = self._head(self.whole_object)
        body["choices"] = [self._choice(index, choice) for index, choice in enumerate(choices)]
        body["usage"] = usage_of(done.usage)
        if self._reply.timings:
            body["timings"] = asdict(done.timings)
        return orjson.dumps(body)

    @abstractmethod
    def chunk(self, delta: Delta) -> bytes:
        """One delta as an event; empty when it says nothing."""

    @abstractmethod
    def finish(self, choice: int, reason: FinishReason, done: JobDone | None = None) -> bytes:
        """A choice's last event; with `done` it also carries the timings."""

    def last(self, done: JobDone) -> bytes:
        """The usage chunk."""
        out = self._no_choices + b',"usage":' + orjson.dumps(usage_of(done.usage))
        return out + self._timings(done) + b"}\n\n"

    def count(self, delta: Delta) -> None:
        """Keeps the usage so far, for those who want it with every chunk."""
        if self._reply.running:
            before = self._so_far
            made = before.completion_tokens + len(delta.token_ids)
            self._so_far = Usage(delta.prompt_tokens or before.prompt_tokens, made)

    def _event(self, choice: int, rest: bytes, done: JobDone | None = None) -> bytes:
        out = self._before + b"%d," % choice + rest
        if self._reply.running:
            usage = self._so_far if done is None else done.usage
            told = out + b'}],"usage":' + orjson.dumps(usage_of(usage))
            return told + (self._timings(done) if done else b"") + b"}\n\n"
        if done is None:
            return out + self._after
        return out + self._after[:-3] + self._timings(done) + b"}\n\n"

    def _timings(self, done: JobDone) -> bytes:
        if not self._reply.timings:
            return b""
        return b',"timings":' + orjson.dumps(asdict(done.timings))

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._reply.id,
            "object": kind,
            "created": self._reply.created,
            "model": self._reply.model,
            "system_fingerprint": None,
        }

    @abstractmethod
    def _choice(self, index: int, choice: Choice) -> dict[str, Any]: ...


class ChatWire(Wire):
    """chat.completion and chat.completion.chunk."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._begun: set[int] = set()
        self._text_heads: dict[int, bytes] = {}  # of chunks that are text and nothing else
        self._text_tail = b'},"logprobs":null,"finish_reason":null' + self._after

    def chunk(self, delta: Delta) -> bytes:
        """The first delta of a choice carries the role."""
        special = delta.reasoning or delta.calls
        head = self._text_heads.get(delta.choice)
        if head is not None and delta.text and not special:
            return head + orjson.dumps(delta.text) + self._text_tail
        quiet = not delta.text and not delta.logprobs and not special
        if quiet and delta.choice in self._begun:
            return b""
        rest = self._role(delta.choice)
        rest += _more(delta) if special else b'"content":' + orjson.dumps(delta.text)
        return self._event(
            delta.choice,
            rest + b'},"logprobs":' + self._logprobs(delta) + b',"finish_reason":null',
        )

    def finish(self, choice: int, reason: FinishReason, done: JobDone | None = None) -> bytes:
        """The finish reason comes alone, with the role if nothing came before."""
        role = b"" if choice in self._begun else self._role(choice) + b'"content":""'
        rest = (role or b'"delta":{') + b'},"logprobs":null,"finish_reason":"%s"'
        return self._event(choice, rest % reason.value.encode(), done)

    def _role(self, choice: int) -> bytes:
        if choice in self._begun:
            return b'"delta":{'
        self._begun.add(choice)
        if not (self._reply.logprobs or self._reply.running):
            self._text_heads[choice] = self._before + b'%d,"delta":{"content":' % choice
        return b'"delta":{"role":"assistant",'

    def _logprobs(self, delta: Delta) -> bytes:
        if not self._reply.logprobs:
            return b"null"
        return orjson.dumps(chat_logprobs(delta.logprobs, self._reply.bytes_of))

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        reply = self._reply
        text = "".join(choice.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls:
            message |= {"content": text or None, "tool_calls": choice.calls}
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(choice.logprobs, reply.bytes_of) if reply.logprobs else None,
            "finish_reason": choice.reason,
        }


class TextWire(Wire):
    """text_completion, whole and in chunks."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._length: dict[int, int] = {}

    def chunk(self, delta: Delta) -> bytes:
        """Text and logprobs of one delta."""
        if not delta.text and not delta.logprobs:
            return b""
        rest = b'"text":' + orjson.dumps(delta.text) + b',"logprobs":' + self._logprobs(delta)
        return self._event(delta.choice, rest + b',"finish_reason":null')

    def finish(self, choice: int, reason: FinishReason, done: JobDone | None = None) -> bytes:
        """The finish reason, with no text."""
        rest = b'"text":"","logprobs":null,"finish_reason":"%s"' % reason.value.encode()
        return self._event(choice, rest, done)

    def _logprobs(self, delta: Delta) -> bytes:
        if not self._reply.logprobs:
            return b"null"
        start = self._length.get(delta.choice, 0)
        found = text_logprobs(delta.logprobs, self._reply.bytes_of, start)
        self._length[delta.choice] = start + sum(map(len, found["tokens"]))
        return orjson.dumps(found)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        reply = self._reply
        return {
            "index": index,
            "text": "".join(choice.text),
            "logprobs": text_logprobs(choice.logprobs, reply.bytes_of) if reply.logprobs else None,
            "finish_reason": choice.reason,
        }


def _more(delta: Delta) -> bytes:
    """The members of a delta that holds thoughts or calls."""
    members: dict[str, Any] = {}
    if delta.text:
        members["content"] = delta.text
    if delta.reasoning:
        members["reasoning_content"] = delta.reasoning
    if delta.calls:
        members["tool_calls"] = [_call(call) for call in delta.calls]
    return orjson.dumps(members)[1:-1]


def _call(call: CallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    if not call.id:
        return {"index": call.index, "function": function}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, **function},
    }


def usage_of(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object. Prompt tokens include those of pictures and clips."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def chat_logprobs(tokens: Sequence[TokenLogprob], bytes_of: BytesOf) -> dict[str, Any]:
    """Per token: its text, bytes and log probability, and the alternatives'."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = bytes_of(token_id)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": list(raw),
        }

    content = [
        {
            **entry(token.token_id, token.logprob),
            "top_logprobs": [entry(token_id, logprob) for token_id, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    tokens: Sequence[TokenLogprob], bytes_of: BytesOf, offset: int = 0
) -> dict[str, Any]:
    """The older shape: parallel lists; `offset` is where the first token's text begins."""
    texts = [bytes_of(token.token_id).decode("utf-8", "replace") for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [max(token.logprob, _LEAST_LOGPROB) for token in tokens],
        "top_logprobs": [
            {
                bytes_of(token_id).decode("utf-8", "replace"): max(logprob, _LEAST_LOGPROB)
                for token_id, logprob in token.top
            }
            for token in tokens
        ],
        "text_offset": offsets,
    }
