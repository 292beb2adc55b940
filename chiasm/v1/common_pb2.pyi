from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
    DTYPE_FLOAT8_E4M3: _ClassVar[DType]

class Modality(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODALITY_UNSPECIFIED: _ClassVar[Modality]
    MODALITY_IMAGE: _ClassVar[Modality]
    MODALITY_VIDEO: _ClassVar[Modality]

class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAUSE_UNSPECIFIED: _ClassVar[Cause]
    CAUSE_LOST: _ClassVar[Cause]
    CAUSE_EVICTED: _ClassVar[Cause]
    CAUSE_PREEMPTED: _ClassVar[Cause]
    CAUSE_TIMEOUT: _ClassVar[Cause]
    CAUSE_INVALID_MEDIA: _ClassVar[Cause]
    CAUSE_TOO_LARGE: _ClassVar[Cause]
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_FLOAT16: DType
DTYPE_BFLOAT16: DType
DTYPE_FLOAT8_E4M3: DType
MODALITY_UNSPECIFIED: Modality
MODALITY_IMAGE: Modality
MODALITY_VIDEO: Modality
CAUSE_UNSPECIFIED: Cause
CAUSE_LOST: Cause
CAUSE_EVICTED: Cause
CAUSE_PREEMPTED: Cause
CAUSE_TIMEOUT: Cause
CAUSE_INVALID_MEDIA: Cause
CAUSE_TOO_LARGE: Cause

class ContractVersion(_message.Message):
    __slots__ = ("major", "minor")
    MAJOR_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    major: int
    minor: int
    def __init__(self, major: _Optional[int] = ..., minor: _Optional[int] = ...) -> None: ...

class Digests(_message.Message):
    __slots__ = ("tower", "processor", "tokenizer", "language_model")
    TOWER_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    LANGUAGE_MODEL_FIELD_NUMBER: _ClassVar[int]
    tower: bytes
    processor: bytes
    tokenizer: bytes
    language_model: bytes
    def __init__(self, tower: _Optional[bytes] = ..., processor: _Optional[bytes] = ..., tokenizer: _Optional[bytes] = ..., language_model: _Optional[bytes] = ...) -> None: ...

class RowFormat(_message.Message):
    __slots__ = ("hidden_size", "levels", "dtype")
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    hidden_size: int
    levels: int
    dtype: DType
    def __init__(self, hidden_size: _Optional[int] = ..., levels: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class MediaPlan(_message.Message):
    __slots__ = ("digest", "family", "modality", "source_height", "source_width", "resized_height", "resized_width", "grids", "num_rows", "frame_indices", "frame_timestamps_s", "seconds_per_grid", "media_bytes", "media_type")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_WIDTH_FIELD_NUMBER: _ClassVar[int]
    RESIZED_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    RESIZED_WIDTH_FIELD_NUMBER: _ClassVar[int]
    GRIDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    FRAME_INDICES_FIELD_NUMBER: _ClassVar[int]
    FRAME_TIMESTAMPS_S_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_GRID_FIELD_NUMBER: _ClassVar[int]
    MEDIA_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    family: str
    modality: Modality
    source_height: int
    source_width: int
    resized_height: int
    resized_width: int
    grids: _containers.RepeatedCompositeFieldContainer[Grid]
    num_rows: int
    frame_indices: _containers.RepeatedScalarFieldContainer[int]
    frame_timestamps_s: _containers.RepeatedScalarFieldContainer[float]
    seconds_per_grid: float
    media_bytes: int
    media_type: str
    def __init__(self, digest: _Optional[bytes] = ..., family: _Optional[str] = ..., modality: _Optional[_Union[Modality, str]] = ..., source_height: _Optional[int] = ..., source_width: _Optional[int] = ..., resized_height: _Optional[int] = ..., resized_width: _Optional[int] = ..., grids: _Optional[_Iterable[_Union[Grid, _Mapping]]] = ..., num_rows: _Optional[int] = ..., frame_indices: _Optional[_Iterable[int]] = ..., frame_timestamps_s: _Optional[_Iterable[float]] = ..., seconds_per_grid: _Optional[float] = ..., media_bytes: _Optional[int] = ..., media_type: _Optional[str] = ...) -> None: ...

class Grid(_message.Message):
    __slots__ = ("t", "h", "w")
    T_FIELD_NUMBER: _ClassVar[int]
    H_FIELD_NUMBER: _ClassVar[int]
    W_FIELD_NUMBER: _ClassVar[int]
    t: int
    h: int
    w: int
    def __init__(self, t: _Optional[int] = ..., h: _Optional[int] = ..., w: _Optional[int] = ...) -> None: ...

class RequestContext(_message.Message):
    __slots__ = ("request_id", "model", "adapter_id", "cache_salt", "priority", "traceparent", "tracestate")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    adapter_id: str
    cache_salt: bytes
    priority: int
    traceparent: str
    tracestate: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., adapter_id: _Optional[str] = ..., cache_salt: _Optional[bytes] = ..., priority: _Optional[int] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("code", "message", "param", "retryable", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    param: str
    retryable: bool
    retry_after_s: float
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ..., retryable: bool = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "pending_patches", "embedding_bytes_free", "embedding_bytes_total", "waiting_tokens", "kv_usage_ratio", "draining", "stalled")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PENDING_PATCHES_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_BYTES_FREE_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_RATIO_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    pending_patches: int
    embedding_bytes_free: int
    embedding_bytes_total: int
    waiting_tokens: int
    kv_usage_ratio: float
    draining: bool
    stalled: bool
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., pending_patches: _Optional[int] = ..., embedding_bytes_free: _Optional[int] = ..., embedding_bytes_total: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., kv_usage_ratio: _Optional[float] = ..., draining: bool = ..., stalled: bool = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Description(_message.Message):
    __slots__ = ("contract", "features", "role", "instance_id", "epoch", "advertised_address", "model", "family", "digests", "rows", "workers", "transports", "max_model_len", "vocab_size", "max_item_patches", "version")
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADVERTISED_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEM_PATCHES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    contract: ContractVersion
    features: _containers.RepeatedScalarFieldContainer[str]
    role: str
    instance_id: str
    epoch: int
    advertised_address: str
    model: str
    family: str
    digests: Digests
    rows: RowFormat
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    transports: _containers.RepeatedScalarFieldContainer[str]
    max_model_len: int
    vocab_size: int
    max_item_patches: int
    version: str
    def __init__(self, contract: _Optional[_Union[ContractVersion, _Mapping]] = ..., features: _Optional[_Iterable[str]] = ..., role: _Optional[str] = ..., instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., advertised_address: _Optional[str] = ..., model: _Optional[str] = ..., family: _Optional[str] = ..., digests: _Optional[_Union[Digests, _Mapping]] = ..., rows: _Optional[_Union[RowFormat, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., transports: _Optional[_Iterable[str]] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_item_patches: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("instance_id", "epoch", "address")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    epoch: int
    address: str
    def __init__(self, instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class Bundle(_message.Message):
    __slots__ = ("strands",)
    STRANDS_FIELD_NUMBER: _ClassVar[int]
    strands: _containers.RepeatedCompositeFieldContainer[Strand]
    def __init__(self, strands: _Optional[_Iterable[_Union[Strand, _Mapping]]] = ...) -> None: ...

class Strand(_message.Message):
    __slots__ = ("call", "message", "timeout_s", "end", "cancelled", "error")
    CALL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    call: int
    message: bytes
    timeout_s: float
    end: bool
    cancelled: bool
    error: ErrorDetail
    def __init__(self, call: _Optional[int] = ..., message: _Optional[bytes] = ..., timeout_s: _Optional[float] = ..., end: bool = ..., cancelled: bool = ..., error: _Optional[_Union[ErrorDetail, _Mapping]] = ...) -> None: ...
