from chiasm.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("start", "redirect", "add_source", "stop_choice")
    START_FIELD_NUMBER: _ClassVar[int]
    REDIRECT_FIELD_NUMBER: _ClassVar[int]
    ADD_SOURCE_FIELD_NUMBER: _ClassVar[int]
    STOP_CHOICE_FIELD_NUMBER: _ClassVar[int]
    start: GenerateStart
    redirect: Redirect
    add_source: AddSource
    stop_choice: StopChoice
    def __init__(self, start: _Optional[_Union[GenerateStart, _Mapping]] = ..., redirect: _Optional[_Union[Redirect, _Mapping]] = ..., add_source: _Optional[_Union[AddSource, _Mapping]] = ..., stop_choice: _Optional[_Union[StopChoice, _Mapping]] = ...) -> None: ...

class GenerateStart(_message.Message):
    __slots__ = ("context", "prompt_token_ids", "promises", "sampling", "resume_from")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMISES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.RequestContext
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    promises: _containers.RepeatedCompositeFieldContainer[Promise]
    sampling: SamplingParams
    resume_from: _containers.RepeatedCompositeFieldContainer[ResumeFrom]
    def __init__(self, context: _Optional[_Union[_common_pb2.RequestContext, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., promises: _Optional[_Iterable[_Union[Promise, _Mapping]]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., resume_from: _Optional[_Iterable[_Union[ResumeFrom, _Mapping]]] = ...) -> None: ...

class Promise(_message.Message):
    __slots__ = ("item", "plan", "prompt_offset", "parts", "placeholders")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PLACEHOLDERS_FIELD_NUMBER: _ClassVar[int]
    item: int
    plan: _common_pb2.MediaPlan
    prompt_offset: int
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    placeholders: _containers.RepeatedCompositeFieldContainer[_common_pb2.Range]
    def __init__(self, item: _Optional[int] = ..., plan: _Optional[_Union[_common_pb2.MediaPlan, _Mapping]] = ..., prompt_offset: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., placeholders: _Optional[_Iterable[_Union[_common_pb2.Range, _Mapping]]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("part", "rows", "frames", "source", "attempt")
    PART_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    part: int
    rows: _common_pb2.Range
    frames: _common_pb2.Range
    source: Source
    attempt: int
    def __init__(self, part: _Optional[int] = ..., rows: _Optional[_Union[_common_pb2.Range, _Mapping]] = ..., frames: _Optional[_Union[_common_pb2.Range, _Mapping]] = ..., source: _Optional[_Union[Source, _Mapping]] = ..., attempt: _Optional[int] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("encode_id", "endpoint", "encoder_epoch")
    ENCODE_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ENCODER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    encode_id: bytes
    endpoint: str
    encoder_epoch: int
    def __init__(self, encode_id: _Optional[bytes] = ..., endpoint: _Optional[str] = ..., encoder_epoch: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop_token_ids", "ignore_eos", "n", "top_logprobs", "logit_bias", "grammar")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    n: int
    top_logprobs: int
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    grammar: Grammar
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., n: _Optional[int] = ..., top_logprobs: _Optional[int] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "lark", "param")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    lark: str
    param: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class ResumeFrom(_message.Message):
    __slots__ = ("choice", "output_ids")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, choice: _Optional[int] = ..., output_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Redirect(_message.Message):
    __slots__ = ("item", "part", "attempt", "source")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    item: int
    part: int
    attempt: int
    source: Source
    def __init__(self, item: _Optional[int] = ..., part: _Optional[int] = ..., attempt: _Optional[int] = ..., source: _Optional[_Union[Source, _Mapping]] = ...) -> None: ...

class AddSource(_message.Message):
    __slots__ = ("item", "part", "attempt", "source")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    item: int
    part: int
    attempt: int
    source: Source
    def __init__(self, item: _Optional[int] = ..., part: _Optional[int] = ..., attempt: _Optional[int] = ..., source: _Optional[_Union[Source, _Mapping]] = ...) -> None: ...

class StopChoice(_message.Message):
    __slots__ = ("choice",)
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    choice: int
    def __init__(self, choice: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("accepted", "tokens", "landed", "embedding_lost", "finished", "done")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LANDED_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_LOST_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    accepted: GenerateAccepted
    tokens: TokenDelta
    landed: Landed
    embedding_lost: EmbeddingLost
    finished: ChoiceFinished
    done: GenerateDone
    def __init__(self, accepted: _Optional[_Union[GenerateAccepted, _Mapping]] = ..., tokens: _Optional[_Union[TokenDelta, _Mapping]] = ..., landed: _Optional[_Union[Landed, _Mapping]] = ..., embedding_lost: _Optional[_Union[EmbeddingLost, _Mapping]] = ..., finished: _Optional[_Union[ChoiceFinished, _Mapping]] = ..., done: _Optional[_Union[GenerateDone, _Mapping]] = ...) -> None: ...

class GenerateAccepted(_message.Message):
    __slots__ = ("decoder_epoch",)
    DECODER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    decoder_epoch: int
    def __init__(self, decoder_epoch: _Optional[int] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("choice", "position", "token_ids", "logprobs")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, choice: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Landed(_message.Message):
    __slots__ = ("item", "from_prefix_cache")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    FROM_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    item: int
    from_prefix_cache: bool
    def __init__(self, item: _Optional[int] = ..., from_prefix_cache: bool = ...) -> None: ...

class EmbeddingLost(_message.Message):
    __slots__ = ("item", "part", "attempt", "cause", "message")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    item: int
    part: int
    attempt: int
    cause: _common_pb2.Cause
    message: str
    def __init__(self, item: _Optional[int] = ..., part: _Optional[int] = ..., attempt: _Optional[int] = ..., cause: _Optional[_Union[_common_pb2.Cause, str]] = ..., message: _Optional[str] = ...) -> None: ...

class ChoiceFinished(_message.Message):
    __slots__ = ("choice", "reason", "stop_token_id")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    choice: int
    reason: FinishReason
    stop_token_id: int
    def __init__(self, choice: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class GenerateDone(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens", "queue_ms", "transfer_ms", "prefill_ms", "decode_ms")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_ms: float
    transfer_ms: float
    prefill_ms: float
    decode_ms: float
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., queue_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ...) -> None: ...
