"""Request bodies: OpenAI's field names and the field's extensions, as pydantic models.

Types and ranges only; what needs the model or the rest of the request is checked in `jobs.py`.
Unknown fields are ignored. null means "not given". Fields that would change the answer and are not
supported are declared here, so that they are refused by name and never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from gateway.api.guide_schema import ResponseFormat, StructuredOutputs, ToolBody, ToolChoiceBody

Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
NonEmpty = Annotated[str, Field(strict=True, min_length=1)]
StopText = Annotated[str, Field(strict=True, min_length=1, max_length=1024)]
Uuid = Annotated[str, Field(strict=True, max_length=256)]
Pixels = Annotated[int, Field(strict=True, ge=1)]
TokenId = Annotated[int, Field(strict=True, ge=0)]

_Item = TypeVar("_Item")
Several = Annotated[list[_Item], Field(fail_fast=True)]
"""As many as there are. The first that is wrong ends it: to describe a million takes seconds."""

Refused = Annotated[Any, Field(description="refused, unless it asks for nothing")]

MOST_BIASES = 1024

TAG = "@"  # tags of unions begin so; error paths leave them out


_OPEN = ConfigDict(extra="ignore", frozen=True)


class _Body(BaseModel):
    model_config = _OPEN


class MediaUrl(_Body):
    """Where a medium is: http(s) or data."""

    url: NonEmpty
    detail: Literal["auto", "low", "high"] | None = None
    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None


def _url_kind(value: Any) -> str:
    return "@string" if isinstance(value, str) else "@object"


Url = Annotated[
    Annotated[NonEmpty, Tag("@string")] | Annotated[MediaUrl, Tag("@object")],
    Discriminator(_url_kind),
]


class TextContent(_Body):
    """A run of text."""

    type: Literal["text"]
    text: Text


class RefusalContent(_Body):
    """What an assistant once said instead of an answer."""

    type: Literal["refusal"]
    refusal: Text


class ImageContent(_Body):
    """A picture; the URL may also be given as a plain string, bounds also inside its object.

    `uuid` has no effect on the answer: what a medium is known by is its bytes.
    """

    type: Literal["image_url"]
    image_url: Url
    uuid: Uuid | None = None
    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None


class VideoContent(_Body):
    """A clip; the URL may also be given as a plain string."""

    type: Literal["video_url"]
    video_url: Url
    uuid: Uuid | None = None
    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None


PART_TYPES = ("text", "refusal", "image_url", "video_url")


def _part_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"@{kind}" if kind in PART_TYPES else None


ContentPart = Annotated[
    Annotated[TextContent, Tag("@text")]
    | Annotated[RefusalContent, Tag("@refusal")]
    | Annotated[ImageContent, Tag("@image_url")]
    | Annotated[VideoContent, Tag("@video_url")],
    Discriminator(
        _part_kind,
        custom_error_type="part_type",
        custom_error_message=f"a content part's type must be one of {', '.join(PART_TYPES)}",
    ),
]


def _content_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "@string"
    return "@parts" if isinstance(value, list | tuple) else None


Content = Annotated[
    Annotated[Text, Tag("@string")] | Annotated[Several[ContentPart], Tag("@parts")],
    Discriminator(
        _content_kind,
        custom_error_type="content_type",
        custom_error_message="content must be a string or a list of parts",
    ),
]


class FunctionCall(_Body):
    """Which function an assistant turn called, with arguments as JSON text."""

    name: Text
    arguments: Text = ""


class ToolCallBody(_Body):
    """One call of an assistant turn of the history."""

    id: Text = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class MessageBody(_Body):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Text | None = None
    tool_calls: Several[ToolCallBody] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    """What the assistant thought, for templates that show it."""


class StreamOptions(_Body):
    """What a stream carries beside text."""

    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None
    """Whether every chunk says how many tokens there are so far; needs include_usage."""


class MediaKwargs(BaseModel):
    """`mm_processor_kwargs`: bounds on pictures and clips. Other keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_pixels: Annotated[int, Field(strict=True, ge=1)] | None = None
    max_pixels: Annotated[int, Field(strict=True, ge=1)] | None = None
    fps: Annotated[float, Field(strict=True, gt=0, le=240)] | None = None
    max_frames: Annotated[int, Field(strict=True, ge=1)] | None = None


def _list_kind(value: Any) -> str:
    return "@string" if isinstance(value, str) else "@list"


Stop = Annotated[
    Annotated[StopText, Tag("@string")]
    | Annotated[list[StopText], Field(max_length=4), Tag("@list")],
    Discriminator(_list_kind),
]


def _bounded(value: Any) -> Any:
    """Counts before anything is looked at, as lists do."""
    if isinstance(value, dict) and len(value) > MOST_BIASES:
        raise ValueError(f"at most {MOST_BIASES} biases, not {len(value)}")
    return value


class SamplingBody(BaseModel):
    """What both endpoints take."""

    model_config = _OPEN

    model: NonEmpty
    max_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    min_tokens: Annotated[int, Field(strict=True, ge=0)] | None = None
    temperature: Annotated[Float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[Float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Float, Field(gt=0, le=10)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**64)] | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=128)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: Flag | None = None
    logit_bias: (
        Annotated[dict[str, Float], Field(max_length=MOST_BIASES), BeforeValidator(_bounded)] | None
    ) = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None
    return_timings: Flag | None = None
    cache_salt: NonEmpty | None = None
    priority: Annotated[int, Field(strict=True, ge=-100, le=100)] | None = None

    include_stop_str_in_output: Flag | None = None
    skip_special_tokens: Flag | None = None
    spaces_between_special_tokens: Flag | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | Text | None = None
    guided_regex: NonEmpty | None = None
    guided_choice: Annotated[list[Text], Field(min_length=1, max_length=10_000)] | None = None
    guided_grammar: NonEmpty | None = None

    # Refused unless they ask for nothing: see jobs.refuse_unsupported.
    bad_words: Refused = None
    allowed_token_ids: Refused = None
    truncate_prompt_tokens: Refused = None
    logits_processors: Refused = None
    return_token_ids: Refused = None
    return_tokens_as_token_ids: Refused = None
    length_penalty: Refused = None
    kv_transfer_params: Refused = None
    use_beam_search: Refused = None
    prompt_logprobs: Refused = None


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Annotated[Several[MessageBody], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    mm_processor_kwargs: MediaKwargs | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: Annotated[list[ToolBody], Field(max_length=1024)] | None = None
    tool_choice: ToolChoiceBody | None = None
    parallel_tool_calls: Flag | None = None
    include_reasoning: Flag | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None

    functions: Refused = None
    function_call: Refused = None
    modalities: Refused = None
    audio: Refused = None
    prediction: Refused = None
    web_search_options: Refused = None
    chat_template: Refused = None
    documents: Refused = None


def _prompt_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "@string"
    if not isinstance(value, list | tuple) or not value:
        return None
    first = value[0]
    if isinstance(first, str):
        return "@strings"
    return "@id_lists" if isinstance(first, list | tuple) else "@ids"


Ids = Annotated[Several[TokenId], Field(min_length=1)]
Prompt = Annotated[
    Annotated[Text, Tag("@string")]
    | Annotated[list[Text], Field(max_length=128), Tag("@strings")]
    | Annotated[Ids, Tag("@ids")]
    | Annotated[list[Ids], Field(max_length=128), Tag("@id_lists")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="prompt must be a string, a list of strings, a list of token ids or "
        "a list of lists of token ids, and not empty",
    ),
]


class CompletionBody(SamplingBody):
    """POST /v1/completions. Names of special tokens in a text prompt are plain text; ids count."""

    prompt: Prompt
    logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None

    suffix: Refused = None
    echo: Refused = None
    best_of: Refused = None


class TokenizeBody(_Body):
    """POST /tokenize: a text, or messages as the chat template renders them (no media)."""

    model: NonEmpty | None = None
    prompt: Text | None = None
    messages: Annotated[Several[MessageBody], Field(min_length=1)] | None = None
    parse_special: Flag = False
    """Whether names of special tokens in `prompt` count."""
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    tools: Annotated[list[ToolBody], Field(max_length=1024)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: Flag = False


class DetokenizeBody(_Body):
    """POST /detokenize."""

    model: NonEmpty | None = None
    tokens: Several[TokenId]
