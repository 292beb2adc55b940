"""The gRPC face over a scripted pipeline: the same answers, errors and keys."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from chiasm.channel import connect
from chiasm.errors import ChiasmError, ModelNotFound, Unauthenticated, Unavailable, from_rpc
from chiasm.plan import Modality
from chiasm.server import Server
from chiasm.v1 import gateway_pb2, gateway_pb2_grpc
from gateway.api.drain import Gate
from gateway.api.keys import ApiKeys
from gateway.api.servicer import GatewayServicer, KeyInterceptor
from gateway.messages import ChatJob, MediaPart, Role, TextPart
from tests.unit.gateway_face.scripted import USAGE, ScriptedPipeline, make_face
from tests.waiting import until

KEYS = ApiKeys([hashlib.sha256(b"right").digest()])


@asynccontextmanager
async def face_over(
    pipeline: ScriptedPipeline, *, keys: ApiKeys | None = None, gate: Gate | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    face = make_face(pipeline, keys=keys)
    server = Server("127.0.0.1", 0, drain_s=0, interceptors=(KeyInterceptor(face),))
    gateway_pb2_grpc.add_GatewayServicer_to_server(
        GatewayServicer(face, gate or Gate()), server.grpc
    )
    await server.start(("chiasm.v1.Gateway",))
    await server.ready(True)
    async with connect(server.address) as channel:
        yield channel
    await server.stop()


def request(**fields: object) -> gateway_pb2.ChatRequest:
    part = gateway_pb2.ContentPart(text="hi")
    message = gateway_pb2.ChatMessage(role="user", parts=[part])
    return gateway_pb2.ChatRequest(**{"model": "demo", "messages": [message], **fields})


async def test_a_chat() -> None:
    pipeline = ScriptedPipeline()
    async with face_over(pipeline) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).Chat(
            request(n=2, return_timings=True), metadata=(("x-request-id", "my-id"),)
        )
        assert ("x-request-id", "my-id") in tuple(await call.initial_metadata())
        found = [response async for response in call]
    for choice in (0, 1):
        mine = [r for r in found[:-1] if r.choice == choice]
        assert "".join(r.delta for r in mine) == "red circle"
        assert [r.finish_reason for r in mine] == ["", "", "stop"]
    assert found[-1].usage.prompt_tokens == USAGE.prompt_tokens
    assert found[-1].timings.first_token == 2.5
    assert len({r.id for r in found}) == 1
    assert pipeline.jobs[0].request_id.startswith("my-id-")


async def test_files_travel_as_bytes() -> None:
    pipeline = ScriptedPipeline()
    parts = [
        gateway_pb2.ContentPart(image=b"\x89PNG"),
        gateway_pb2.ContentPart(video_url="https://example.org/a.mp4"),
        gateway_pb2.ContentPart(text="what?"),
    ]
    messages = [
        gateway_pb2.ChatMessage(role="developer", parts=[gateway_pb2.ContentPart(text="brief")]),
        gateway_pb2.ChatMessage(role="user", parts=parts),
    ]
    async with face_over(pipeline) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        async for _ in stub.Chat(request(messages=messages), timeout=60):
            pass
    job = pipeline.jobs[0]
    assert isinstance(job, ChatJob)
    assert job.messages[0].role is Role.SYSTEM
    assert job.messages[1].parts == (
        MediaPart(Modality.IMAGE, data=b"\x89PNG", param="messages[1].parts[0]"),
        MediaPart(Modality.VIDEO, url="https://example.org/a.mp4", param="messages[1].parts[1]"),
        TextPart("what?"),
    )
    assert job.timeout_s is not None
    assert 0 < job.timeout_s < 62  # gRPC rounds what is left up on its way


async def failure(channel: grpc.aio.Channel, message: gateway_pb2.ChatRequest) -> ChiasmError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in gateway_pb2_grpc.GatewayStub(channel).Chat(message):
            pass
    return from_rpc(caught.value)


async def test_errors_keep_their_code_and_param() -> None:
    pipeline = ScriptedPipeline()
    async with face_over(pipeline) as channel:
        error = await failure(channel, request(model="other"))
        assert isinstance(error, ModelNotFound)
        assert error.param == "model"
        assert (await failure(channel, request(n=0))).param == "n"
        pipeline.fail_after = (1, Unavailable("gone"))
        assert isinstance(await failure(channel, request()), Unavailable)


async def test_cancelling_the_call_cancels_the_run() -> None:
    pipeline = ScriptedPipeline(hold=asyncio.Event())
    async with face_over(pipeline) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).Chat(request())
        await call.read()
        await until(lambda: pipeline.held)
        call.cancel()
        await until(lambda: pipeline.ends)
    assert pipeline.ends == ["cancelled"]


async def test_models_and_the_closed_gate() -> None:
    pipeline, gate = ScriptedPipeline(), Gate()
    async with face_over(pipeline, gate=gate) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        listed = await stub.ListModels(gateway_pb2.ListModelsRequest())
        assert [model.id for model in listed.models] == list(pipeline.names)
        gate.draining = True
        error = await failure(channel, request())
        assert isinstance(error, Unavailable)
        assert error.retry_after_s


async def test_what_outlasts_the_drain_is_told() -> None:
    pipeline, gate = ScriptedPipeline(hold=asyncio.Event()), Gate()
    async with face_over(pipeline, gate=gate) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).Chat(request())
        await call.read()
        await until(lambda: pipeline.held)
        await gate.drain(0.05)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert isinstance(from_rpc(caught.value), Unavailable)
    assert pipeline.ends == ["cancelled"]


@pytest.mark.parametrize("value", [None, "Bearer wrong", "right", "Basic right"])
async def test_every_method_but_health_asks_for_a_key(value: str | None) -> None:
    pipeline = ScriptedPipeline()
    metadata = () if value is None else (("authorization", value),)
    async with face_over(pipeline, keys=KEYS) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        info = reflection_pb2.ServerReflectionRequest(list_services="")
        calls = [
            stub.Chat(request(), metadata=metadata).read(),
            stub.ListModels(gateway_pb2.ListModelsRequest(), metadata=metadata),
            reflection_pb2_grpc.ServerReflectionStub(channel)
            .ServerReflectionInfo(iter([info]), metadata=metadata)
            .read(),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert isinstance(from_rpc(caught.value), Unauthenticated)
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), metadata=metadata)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert not pipeline.jobs


async def test_a_right_key_passes_with_a_tenant() -> None:
    pipeline = ScriptedPipeline()
    async with face_over(pipeline, keys=KEYS) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        async for _ in stub.Chat(request(), metadata=(("authorization", "bearer right"),)):
            pass
    assert pipeline.jobs[0].tenant_salt == KEYS.tenant(["Bearer right"])
