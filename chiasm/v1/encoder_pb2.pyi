from chiasm.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EncodeRequest(_message.Message):
    __slots__ = ("start", "chunk")
    START_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    start: EncodeStart
    chunk: bytes
    def __init__(self, start: _Optional[_Union[EncodeStart, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class EncodeStart(_message.Message):
    __slots__ = ("context", "encode_id", "plan", "frames", "rows", "encoder_epoch", "repair")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ENCODE_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.RequestContext
    encode_id: bytes
    plan: _common_pb2.MediaPlan
    frames: _common_pb2.Range
    rows: _common_pb2.Range
    encoder_epoch: int
    repair: bool
    def __init__(self, context: _Optional[_Union[_common_pb2.RequestContext, _Mapping]] = ..., encode_id: _Optional[bytes] = ..., plan: _Optional[_Union[_common_pb2.MediaPlan, _Mapping]] = ..., frames: _Optional[_Union[_common_pb2.Range, _Mapping]] = ..., rows: _Optional[_Union[_common_pb2.Range, _Mapping]] = ..., encoder_epoch: _Optional[int] = ..., repair: bool = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("accepted", "ready", "done", "error")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    accepted: EncodeAccepted
    ready: EncodeReady
    done: EncodeDone
    error: ItemError
    def __init__(self, accepted: _Optional[_Union[EncodeAccepted, _Mapping]] = ..., ready: _Optional[_Union[EncodeReady, _Mapping]] = ..., done: _Optional[_Union[EncodeDone, _Mapping]] = ..., error: _Optional[_Union[ItemError, _Mapping]] = ...) -> None: ...

class EncodeAccepted(_message.Message):
    __slots__ = ("encoder_epoch", "cached", "media_needed")
    ENCODER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    MEDIA_NEEDED_FIELD_NUMBER: _ClassVar[int]
    encoder_epoch: int
    cached: bool
    media_needed: bool
    def __init__(self, encoder_epoch: _Optional[int] = ..., cached: bool = ..., media_needed: bool = ...) -> None: ...

class EncodeReady(_message.Message):
    __slots__ = ("segment", "rows")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    segment: int
    rows: _common_pb2.Range
    def __init__(self, segment: _Optional[int] = ..., rows: _Optional[_Union[_common_pb2.Range, _Mapping]] = ...) -> None: ...

class EncodeDone(_message.Message):
    __slots__ = ("queue_ms", "preprocess_ms", "forward_ms", "substituted_frames")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREPROCESS_MS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_MS_FIELD_NUMBER: _ClassVar[int]
    SUBSTITUTED_FRAMES_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    preprocess_ms: float
    forward_ms: float
    substituted_frames: int
    def __init__(self, queue_ms: _Optional[float] = ..., preprocess_ms: _Optional[float] = ..., forward_ms: _Optional[float] = ..., substituted_frames: _Optional[int] = ...) -> None: ...

class ItemError(_message.Message):
    __slots__ = ("cause", "message")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    cause: _common_pb2.Cause
    message: str
    def __init__(self, cause: _Optional[_Union[_common_pb2.Cause, str]] = ..., message: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("open", "grant", "cancel")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    open: FetchOpen
    grant: FetchGrant
    cancel: FetchCancel
    def __init__(self, open: _Optional[_Union[FetchOpen, _Mapping]] = ..., grant: _Optional[_Union[FetchGrant, _Mapping]] = ..., cancel: _Optional[_Union[FetchCancel, _Mapping]] = ...) -> None: ...

class FetchOpen(_message.Message):
    __slots__ = ("fetch_id", "digest", "rows", "encode_id", "encoder_epoch", "peers", "request_id", "attempt", "rows_format")
    FETCH_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_ID_FIELD_NUMBER: _ClassVar[int]
    ENCODER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FORMAT_FIELD_NUMBER: _ClassVar[int]
    fetch_id: bytes
    digest: bytes
    rows: _common_pb2.Range
    encode_id: bytes
    encoder_epoch: int
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    request_id: str
    attempt: int
    rows_format: _common_pb2.RowFormat
    def __init__(self, fetch_id: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., rows: _Optional[_Union[_common_pb2.Range, _Mapping]] = ..., encode_id: _Optional[bytes] = ..., encoder_epoch: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., rows_format: _Optional[_Union[_common_pb2.RowFormat, _Mapping]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("rank", "agent_name", "agent_epoch", "agent_metadata", "memory_type")
    RANK_FIELD_NUMBER: _ClassVar[int]
    AGENT_NAME_FIELD_NUMBER: _ClassVar[int]
    AGENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TYPE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    agent_name: str
    agent_epoch: int
    agent_metadata: bytes
    memory_type: str
    def __init__(self, rank: _Optional[int] = ..., agent_name: _Optional[str] = ..., agent_epoch: _Optional[int] = ..., agent_metadata: _Optional[bytes] = ..., memory_type: _Optional[str] = ...) -> None: ...

class FetchGrant(_message.Message):
    __slots__ = ("segment", "destinations")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    DESTINATIONS_FIELD_NUMBER: _ClassVar[int]
    segment: int
    destinations: _containers.RepeatedCompositeFieldContainer[Destination]
    def __init__(self, segment: _Optional[int] = ..., destinations: _Optional[_Iterable[_Union[Destination, _Mapping]]] = ...) -> None: ...

class Destination(_message.Message):
    __slots__ = ("rank", "agent_name", "agent_epoch", "memory_type", "device", "address", "length", "rows")
    RANK_FIELD_NUMBER: _ClassVar[int]
    AGENT_NAME_FIELD_NUMBER: _ClassVar[int]
    AGENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    agent_name: str
    agent_epoch: int
    memory_type: str
    device: int
    address: int
    length: int
    rows: _common_pb2.Range
    def __init__(self, rank: _Optional[int] = ..., agent_name: _Optional[str] = ..., agent_epoch: _Optional[int] = ..., memory_type: _Optional[str] = ..., device: _Optional[int] = ..., address: _Optional[int] = ..., length: _Optional[int] = ..., rows: _Optional[_Union[_common_pb2.Range, _Mapping]] = ...) -> None: ...

class FetchCancel(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("accepted", "ready", "written", "chunk", "done", "error", "quiesced", "unwritten")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    QUIESCED_FIELD_NUMBER: _ClassVar[int]
    UNWRITTEN_FIELD_NUMBER: _ClassVar[int]
    accepted: FetchAccepted
    ready: FetchReady
    written: FetchWritten
    chunk: FetchChunk
    done: FetchDone
    error: ItemError
    quiesced: FetchQuiesced
    unwritten: FetchUnwritten
    def __init__(self, accepted: _Optional[_Union[FetchAccepted, _Mapping]] = ..., ready: _Optional[_Union[FetchReady, _Mapping]] = ..., written: _Optional[_Union[FetchWritten, _Mapping]] = ..., chunk: _Optional[_Union[FetchChunk, _Mapping]] = ..., done: _Optional[_Union[FetchDone, _Mapping]] = ..., error: _Optional[_Union[ItemError, _Mapping]] = ..., quiesced: _Optional[_Union[FetchQuiesced, _Mapping]] = ..., unwritten: _Optional[_Union[FetchUnwritten, _Mapping]] = ...) -> None: ...

class FetchAccepted(_message.Message):
    __slots__ = ("encoder_epoch", "memory_types", "segments")
    ENCODER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TYPES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    encoder_epoch: int
    memory_types: _containers.RepeatedScalarFieldContainer[str]
    segments: _containers.RepeatedCompositeFieldContainer[_common_pb2.Range]
    def __init__(self, encoder_epoch: _Optional[int] = ..., memory_types: _Optional[_Iterable[str]] = ..., segments: _Optional[_Iterable[_Union[_common_pb2.Range, _Mapping]]] = ...) -> None: ...

class FetchReady(_message.Message):
    __slots__ = ("segment", "rows", "format")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    segment: int
    rows: _common_pb2.Range
    format: _common_pb2.RowFormat
    def __init__(self, segment: _Optional[int] = ..., rows: _Optional[_Union[_common_pb2.Range, _Mapping]] = ..., format: _Optional[_Union[_common_pb2.RowFormat, _Mapping]] = ...) -> None: ...

class FetchWritten(_message.Message):
    __slots__ = ("segment", "seq", "crc32")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    segment: int
    seq: int
    crc32: int
    def __init__(self, segment: _Optional[int] = ..., seq: _Optional[int] = ..., crc32: _Optional[int] = ...) -> None: ...

class FetchUnwritten(_message.Message):
    __slots__ = ("segment", "seq", "aborted")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    segment: int
    seq: int
    aborted: bool
    def __init__(self, segment: _Optional[int] = ..., seq: _Optional[int] = ..., aborted: bool = ...) -> None: ...

class FetchChunk(_message.Message):
    __slots__ = ("segment", "offset", "data")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    segment: int
    offset: int
    data: bytes
    def __init__(self, segment: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class FetchDone(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchQuiesced(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: bool
    def __init__(self, aborted: bool = ...) -> None: ...

class FenceRequest(_message.Message):
    __slots__ = ("fetch_id", "encoder_epoch")
    FETCH_ID_FIELD_NUMBER: _ClassVar[int]
    ENCODER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    fetch_id: bytes
    encoder_epoch: int
    def __init__(self, fetch_id: _Optional[bytes] = ..., encoder_epoch: _Optional[int] = ...) -> None: ...

class FenceResponse(_message.Message):
    __slots__ = ("encoder_epoch",)
    ENCODER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    encoder_epoch: int
    def __init__(self, encoder_epoch: _Optional[int] = ...) -> None: ...
