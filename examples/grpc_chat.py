"""Asks about a picture over gRPC: `python examples/grpc_chat.py localhost:9000 picture.png`."""

import sys
from pathlib import Path

import grpc

from chiasm.v1 import gateway_pb2, gateway_pb2_grpc

address, picture = sys.argv[1:]
parts = [
    gateway_pb2.ContentPart(image=Path(picture).read_bytes()),
    gateway_pb2.ContentPart(text="What is in the picture?"),
]
message = gateway_pb2.ChatMessage(role="user", parts=parts)
with grpc.insecure_channel(address) as channel:
    gateway = gateway_pb2_grpc.GatewayStub(channel)
    request = gateway_pb2.ChatRequest(model="demo", messages=[message], temperature=0)
    for answer in gateway.Chat(request, timeout=60):
        print(answer.delta, end="", flush=True)
print()
