"""What the two faces (REST, gRPC) hand to the pipeline, and what comes back: frozen values.

Owns no parsing and no wire format: a face translates, the pipeline decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from chiasm.plan import Modality


class Role(StrEnum):
    """Who speaks. `developer` is mapped to `system` by the faces."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """It has called tools, and waits for what they say."""


class ToolChoice(StrEnum):
    """Whether tools are called."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class TextPart:
    """User text: it never yields special tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One picture or clip, by URL (http, https, file, data) or as the file's own bytes.

    Exactly one of `url` and `data` is set. `param` names the part in errors, such as
    ``messages[0].content[1]``.
    """

    modality: Modality
    url: str | None = None
    data: bytes | None = None
    param: str = ""
    options: MediaOptions | None = None
    """Wishes about this medium alone; what is None there is as the request has it."""

    def __post_init__(self) -> None:
        assert (self.url is None) != (self.data is None), "a media part has a url or data"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call an assistant turn of the history made; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn."""

    role: Role
    parts: tuple[TextPart | MediaPart, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    """What an assistant thought before it spoke, for templates that show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function the model may call."""

    name: str
    body: Mapping[str, Any]
    """As the client gave it: what the chat template shows."""
    parameters: Mapping[str, Any]
    """A JSON schema of an object."""
    strict: bool = False
    """Whether its arguments must fit the schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """The tools of a request."""

    tools: tuple[Tool, ...]
    choice: ToolChoice = ToolChoice.AUTO
    named: str | None = None
    """The one that must be called."""
    parallel: bool = True
    """Whether one answer may call several times."""

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Those that may be called."""
        return tuple(t for t in self.tools if self.named in (None, t.name))

    @property
    def is_forced(self) -> bool:
        """Whether there must be a call."""
        return self.choice is ToolChoice.REQUIRED or self.named is not None


class GuideKind(StrEnum):
    """What an answer's form is given as."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Guide:
    """The form an answer must have."""

    kind: GuideKind
    value: Any
    """A schema, a pattern, a tuple of strings, or a grammar."""
    param: str
    """The request part that asked for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Ranges are checked by the faces; None means "not given"."""

    max_tokens: int | None = None
    """None = what is left of the context."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """None = the pipeline draws one; else in [0, 2**64)."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    top_logprobs: int | None = None
    """Set = logprobs wanted, with that many alternatives (0 = the chosen token's only)."""
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaOptions:
    """A request's wishes about media (`mm_processor_kwargs`); None = the checkpoint's values."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    max_frames: int | None = None

    def over(self, other: MediaOptions) -> MediaOptions:
        """These wishes, and the other's where there are none."""
        mine = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(other, **{name: v for name, v in mine.items() if v is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What every job carries, whatever it asks for."""

    request_id: str
    model: str
    sampling: Sampling
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    """Whether the stop string that ended an answer is part of it."""
    skip_special: bool = True
    """Whether special tokens leave no trace in the text."""
    guide: Guide | None = None
    tenant: bytes = b""
    """Who asks; empty = no keys are asked for."""
    tenant_salt: bytes = b""
    """Separates tenants in every cache and digest."""
    priority: int = 0
    """Higher first."""
    timeout_s: float | None = None
    """The client's own limit; the gateway's limit holds as well."""
    traceparent: str = ""
    tracestate: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob(Envelope):
    """A chat completion."""

    messages: tuple[Message, ...]
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Further variables for the chat template."""
    media_options: MediaOptions = MediaOptions()
    toolbox: Toolbox | None = None
    add_generation_prompt: bool = True
    """Whether the prompt ends with the beginning of an assistant's turn."""
    continue_final: bool = False
    """Whether the last message is left open, to be gone on with."""
    include_reasoning: bool = True
    """Whether the answer tells what the model thought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawJob(Envelope):
    """A plain completion of text, or of token ids as they are. No media."""

    prompt: str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log probability and its best alternatives (id, logprob), likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of a call: its id and name come first and once, its arguments bit by bit."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """Newly decoded text of one choice. All of it may be empty while ids and logprobs are not."""

    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    prompt_tokens: int = 0
    """Tokens of the prompt it answers."""


@dataclass(frozen=True, slots=True)
class ChoiceDone:
    """A choice ended; no Delta of it follows."""

    choice: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted over all choices; the prompt once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time went, in milliseconds. Spans overlap: encode and prefill run together."""

    fetch: float = 0.0
    plan: float = 0.0
    queue: float = 0.0
    encode: float = 0.0
    transfer: float = 0.0
    prefill: float = 0.0
    first_token: float = 0.0
    """From the job's arrival to the first event."""
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class JobDone:
    """Always the last event of a job that did not fail."""

    usage: Usage
    timings: Timings


Event = Delta | ChoiceDone | JobDone
Job = ChatJob | RawJob


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One entry of the model list."""

    id: str
    created: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Readiness:
    """What can be served now. Text needs a decoder; media need an encoder that fits one as well."""

    text: bool
    images: bool
    endpoints: tuple[Mapping[str, Any], ...] = ()
    """Per peer: role, address, ready, and the trouble with it."""
