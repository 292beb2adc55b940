"""Health and reflection on all three services, readiness, and a clean end."""

from __future__ import annotations

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from chiasm.v1 import common_pb2, decoder_pb2_grpc, encoder_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from tests.integration.media import circle, encode
from tests.integration.stack import Stack

SERVICES = {
    "encoder_svc": "chiasm.v1.Encoder",
    "decoder_svc": "chiasm.v1.Decoder",
    "gateway": "chiasm.v1.Gateway",
}


def test_health_and_reflection_on_all_three(stack: Stack) -> None:
    for service in stack.services:
        with grpc.insecure_channel(service.grpc or service.address) as channel:
            name = SERVICES[service.name]
            health = health_pb2_grpc.HealthStub(channel)
            for asked in (name, "", "live"):
                answer = health.Check(health_pb2.HealthCheckRequest(service=asked), timeout=180)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            database = ProtoReflectionDescriptorDatabase(channel)
            assert name in database.get_services()
            assert database.FindFileContainingSymbol(name).package == "chiasm.v1"


def test_describe_is_a_complete_handshake(stack: Stack) -> None:
    descriptions = {}
    for service in stack.services[:3]:
        with grpc.insecure_channel(service.address) as channel:
            stub = (
                encoder_pb2_grpc.EncoderStub(channel)
                if service.name == "encoder_svc"
                else decoder_pb2_grpc.DecoderStub(channel)
            )
            descriptions[service.name] = stub.Describe(common_pb2.DescribeRequest(), timeout=180)
    encoder, decoder = descriptions["encoder_svc"], descriptions["decoder_svc"]
    assert encoder.contract.major == decoder.contract.major == 1
    assert encoder.rows == decoder.rows and encoder.rows.hidden_size > 0
    assert len(encoder.digests.tower) == len(encoder.digests.processor) == 32
    assert len(decoder.digests.tokenizer) == len(decoder.digests.language_model) == 32
    assert encoder.digests.tower == decoder.digests.tower
    assert encoder.epoch != 0 and decoder.epoch != 0 and decoder.max_model_len > 0


def test_chat_over_grpc_equals_rest(stack: Stack, base_url: str) -> None:
    gateway = next(s for s in stack.services if s.name == "gateway")
    picture = encode(circle("red"))
    request = gateway_pb2.ChatRequest(
        model="demo",
        messages=[
            gateway_pb2.ChatMessage(
                role="user",
                parts=[
                    gateway_pb2.ContentPart(image=picture),
                    gateway_pb2.ContentPart(text="What is in the picture?"),
                ],
            )
        ],
        max_tokens=32,
        temperature=0,
        return_timings=True,
    )
    with grpc.insecure_channel(gateway.grpc) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        responses = list(stub.Chat(request, timeout=180))
        models = stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=180)
    text = "".join(response.delta for response in responses)
    assert "red" in text and "circle" in text
    assert responses[-1].usage.prompt_tokens > 64
    assert responses[-1].timings.first_token > 0
    assert [m.id for m in models.models] == [
        m["id"] for m in httpx.get(f"{base_url}/v1/models", timeout=60).json()["data"]
    ]


def test_ready_names_both_halves(base_url: str) -> None:
    answer = httpx.get(f"{base_url}/ready", timeout=60)
    assert answer.status_code == 200
    body = answer.json()
    assert body["text"] and body["images"]
    assert httpx.get(f"{base_url}/health", timeout=60).status_code == 200
    assert "chiasm_time_to_first_token_seconds" in httpx.get(f"{base_url}/metrics", timeout=60).text
