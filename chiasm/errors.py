"""The one error tree and its one status table, used by REST, by gRPC and inside streams.

ChiasmError
├── InvalidRequest          400  the client's fault; `param` names the part
│   ├── InvalidMedia        400  bytes that are not the picture or clip they claim to be
│   └── TooLarge            413  over a limit on bytes, pixels, frames, tokens
├── Unauthenticated         401
├── NotFound                404
│   └── ModelNotFound       404
├── MethodNotAllowed        405
├── UnsupportedMediaType    415
├── ResourceExhausted       429  full: try again later
├── Cancelled               499  the client went away
├── Unavailable             503  a service is not there: try again
│   ├── ContractMismatch    503  it is there but does not fit
│   └── EmbeddingLost       503  rows could not be had from any encoder
├── DeadlineExceeded        504
└── Internal                500  our fault; clients never see a traceback
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, cast

import grpc

from chiasm.v1 import common_pb2

ERROR_METADATA_KEY = "chiasm-error-bin"


class ChiasmError(Exception):
    """Base of every error that may cross a service's edge.

    Args:
        message: One sentence for the client; no paths, no tracebacks.
        param: The request part to blame, such as ``messages[0].content[1]``.
        retry_after_s: When trying again makes sense, in seconds.
    """

    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "api_error"  # OpenAI's `type`
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    retryable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def detail(self) -> common_pb2.ErrorDetail:
        """The error as it travels between services."""
        return common_pb2.ErrorDetail(
            code=self.code,
            message=self.message,
            param=self.param or "",
            retryable=self.retryable,
            retry_after_s=self.retry_after_s or 0.0,
        )


class InvalidRequest(ChiasmError):
    """The request is malformed or asks for something that cannot be."""

    code = "invalid_request"
    kind = "invalid_request_error"
    http_status = 400
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT


class InvalidMedia(InvalidRequest):
    """A picture or clip cannot be decoded, or may not be fetched."""

    code = "invalid_media"


class TooLarge(InvalidRequest):
    """Over a limit on bytes, pixels, frames, items or tokens."""

    code = "too_large"
    http_status = 413


class Unauthenticated(ChiasmError):
    """No key, or a wrong one."""

    code = "invalid_api_key"
    kind = "authentication_error"
    http_status = 401
    grpc_status = grpc.StatusCode.UNAUTHENTICATED


class NotFound(ChiasmError):
    """No such route or object."""

    code = "not_found"
    kind = "invalid_request_error"
    http_status = 404
    grpc_status = grpc.StatusCode.NOT_FOUND


class ModelNotFound(NotFound):
    """The model named is not served here."""

    code = "model_not_found"


class MethodNotAllowed(ChiasmError):
    """The route exists, the HTTP method does not."""

    code = "method_not_allowed"
    kind = "invalid_request_error"
    http_status = 405
    grpc_status = grpc.StatusCode.UNIMPLEMENTED


class UnsupportedMediaType(ChiasmError):
    """The body is not JSON."""

    code = "unsupported_media_type"
    kind = "invalid_request_error"
    http_status = 415
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT


class ResourceExhausted(ChiasmError):
    """Full; nothing was started."""

    code = "resource_exhausted"
    kind = "rate_limit_error"
    http_status = 429
    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED
    retryable = True


class Cancelled(ChiasmError):
    """The client went away."""

    code = "cancelled"
    http_status = 499
    grpc_status = grpc.StatusCode.CANCELLED


class Unavailable(ChiasmError):
    """A service that is needed is not there."""

    code = "unavailable"
    kind = "service_unavailable_error"
    http_status = 503
    grpc_status = grpc.StatusCode.UNAVAILABLE
    retryable = True


class ContractMismatch(Unavailable):
    """A peer is there but does not fit: contract, digests, hidden size, dtype or levels."""

    code = "contract_mismatch"
    grpc_status = grpc.StatusCode.FAILED_PRECONDITION
    retryable = False


class EmbeddingLost(Unavailable):
    """Rows could not be had from any encoder."""

    code = "embedding_lost"
    grpc_status = grpc.StatusCode.ABORTED


class DeadlineExceeded(ChiasmError):
    """The request's time is up."""

    code = "deadline_exceeded"
    kind = "timeout_error"
    http_status = 504
    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED


class Internal(ChiasmError):
    """A bug of ours."""


def all_errors() -> dict[str, type[ChiasmError]]:
    """Every class of the tree by its code."""
    found: dict[str, type[ChiasmError]] = {}
    queue: list[type[ChiasmError]] = [ChiasmError]
    while queue:
        cls = queue.pop(0)
        queue.extend(cls.__subclasses__())
        found.setdefault(cls.code, cls)
    found["internal_error"] = Internal
    return found


def from_detail(detail: common_pb2.ErrorDetail) -> ChiasmError:
    """Rebuilds the error a peer sent; an unknown code becomes `Internal`."""
    cls = all_errors().get(detail.code, Internal)
    return cls(
        detail.message, param=detail.param or None, retry_after_s=detail.retry_after_s or None
    )


_BY_STATUS: dict[grpc.StatusCode, type[ChiasmError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.FAILED_PRECONDITION: ContractMismatch,
    grpc.StatusCode.ABORTED: EmbeddingLost,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}


def from_rpc(error: grpc.aio.AioRpcError) -> ChiasmError:
    """Turns a failed rpc into the error its server raised, or into the nearest by status code.

    Our servers' INTERNAL comes with its detail. Without one it is gRPC's own: a write met the end
    of the call, whose true status grpc.aio then forgets, or the connection broke.
    """
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in metadata:
        if key == ERROR_METADATA_KEY and isinstance(value, bytes):
            return from_detail(common_pb2.ErrorDetail.FromString(value))
    if error.code() is grpc.StatusCode.INTERNAL:
        return Unavailable("the stream broke")
    cls = _BY_STATUS.get(error.code(), Internal)
    return cls(error.details() or f"peer failed with {error.code().name}")
