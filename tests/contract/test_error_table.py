"""The one error table, over every class and both protocols."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import grpc
import pytest

from chiasm import errors as errors_module
from chiasm.channel import connect, messages, typed_errors
from chiasm.errors import ChiasmError, Internal, InvalidRequest, all_errors, from_detail
from chiasm.server import Server
from chiasm.v1 import gateway_pb2, gateway_pb2_grpc
from gateway.api.errors import error_response

OPENAI_TYPES = {
    "api_error",
    "authentication_error",
    "invalid_request_error",
    "rate_limit_error",
    "service_unavailable_error",
    "timeout_error",
}


def subclasses(cls: type[ChiasmError]) -> list[type[ChiasmError]]:
    found = [cls]
    for child in cls.__subclasses__():
        found += subclasses(child)
    return found


TREE = errors_module.__doc__ or ""
LEAVES = [cls for cls in subclasses(ChiasmError) if cls is not ChiasmError]


def example(cls: type[ChiasmError]) -> ChiasmError:
    return cls("the reason", param="messages[0].content[1]", retry_after_s=2.5)


class Failing(gateway_pb2_grpc.GatewayServicer):
    """Raises what the request's model names; `crash` stands for a bug."""

    async def Chat(  # noqa: N802
        self, request: gateway_pb2.ChatRequest, context: object
    ) -> AsyncIterator[gateway_pb2.ChatResponse]:
        if request.model == "crash":
            raise ZeroDivisionError("secret detail")
        raise example(all_errors()[request.model])
        yield gateway_pb2.ChatResponse()

    async def ListModels(  # noqa: N802
        self, request: gateway_pb2.ListModelsRequest, context: object
    ) -> gateway_pb2.ListModelsResponse:
        raise example(InvalidRequest)


@pytest.fixture
async def stub() -> AsyncIterator[gateway_pb2_grpc.GatewayAsyncStub]:
    server = Server("127.0.0.1", 0, drain_s=0.1)
    gateway_pb2_grpc.add_GatewayServicer_to_server(Failing(), server.grpc)
    await server.start(["chiasm.v1.Gateway"])
    async with connect(server.address) as channel:
        yield gateway_pb2_grpc.GatewayStub(channel)
    await server.stop()


def test_the_table_has_one_row_a_class() -> None:
    codes = [cls.code for cls in LEAVES]
    assert len(codes) == len(set(codes))
    assert set(codes) == set(all_errors())


@pytest.mark.parametrize("cls", LEAVES)
def test_rows_make_sense(cls: type[ChiasmError]) -> None:
    assert cls.kind in OPENAI_TYPES
    assert 400 <= cls.http_status <= 599
    assert cls.grpc_status not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)
    assert not (cls.retryable and cls.http_status < 429), "the client's own fault is not retried"
    assert cls.__doc__
    assert f"{cls.__name__:<20}" in TREE, "not drawn in the docstring"
    assert f"{cls.http_status}" in next(line for line in TREE.splitlines() if cls.__name__ in line)


@pytest.mark.parametrize("cls", LEAVES)
def test_rest_renders_every_class(cls: type[ChiasmError]) -> None:
    response = error_response(example(cls))
    assert response.status_code == cls.http_status
    assert json.loads(bytes(response.body)) == {
        "error": {
            "message": "the reason",
            "type": cls.kind,
            "param": "messages[0].content[1]",
            "code": cls.code,
        }
    }
    assert response.headers["retry-after"] == "3"


@pytest.mark.parametrize("cls", LEAVES)
def test_a_detail_becomes_the_same_error_again(cls: type[ChiasmError]) -> None:
    error = from_detail(example(cls).detail())
    assert type(error) is cls
    assert (error.message, error.param, error.retry_after_s) == (
        "the reason",
        "messages[0].content[1]",
        2.5,
    )


async def test_grpc_carries_every_class(stub: gateway_pb2_grpc.GatewayAsyncStub) -> None:
    for cls in LEAVES:
        call = stub.Chat(gateway_pb2.ChatRequest(model=cls.code))
        with pytest.raises(ChiasmError) as caught:
            async for _ in messages(call):
                pass
        assert type(caught.value) is cls
        assert caught.value.message == "the reason"
        assert caught.value.param == "messages[0].content[1]"
        assert caught.value.retry_after_s == 2.5
        assert await call.code() is cls.grpc_status


async def test_grpc_carries_errors_of_unary_calls(
    stub: gateway_pb2_grpc.GatewayAsyncStub,
) -> None:
    with pytest.raises(InvalidRequest, match="the reason"), typed_errors():
        await stub.ListModels(gateway_pb2.ListModelsRequest())


async def test_a_bug_reaches_the_client_without_its_detail(
    stub: gateway_pb2_grpc.GatewayAsyncStub, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Internal) as caught:
        async for _ in messages(stub.Chat(gateway_pb2.ChatRequest(model="crash"))):
            pass
    assert caught.value.message == "internal error"
    assert "secret detail" in caplog.text, "the log has the traceback"


def test_an_unknown_code_is_internal() -> None:
    detail = example(InvalidRequest).detail()
    detail.code = "from_the_future"
    assert type(from_detail(detail)) is Internal
