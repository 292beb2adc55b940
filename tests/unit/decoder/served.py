"""A decoder over real gRPC, on a tiny model, in this process."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import torch

from chiasm.channel import connect, messages
from chiasm.config import DecoderConfig
from chiasm.config.decoder import MemoryConfig
from chiasm.server import Server
from chiasm.telemetry import DecoderMetrics
from chiasm.v1 import common_pb2, decoder_pb2, decoder_pb2_grpc
from decoder_svc.app import client_of, describe
from decoder_svc.assembly import Parts, build_engine, load_parts, warm_up
from decoder_svc.config import read_text_config
from decoder_svc.engine.client import EngineClient
from decoder_svc.engine.messages import StepPlan
from decoder_svc.grammar_check import GrammarCheck
from decoder_svc.intake import Intake
from decoder_svc.servicer import SERVICE_NAME, DecoderServicer
from tests.waiting import until

torch.set_num_threads(1)


def config_of(model: Path, **changes: Any) -> DecoderConfig:
    memory = MemoryConfig(kv_blocks=64, block_size=4, slab_bytes=1 << 20)
    return DecoderConfig(**{"model": str(model), "memory": memory, **changes})


class Decoder:
    """A served engine."""

    def __init__(self, parts: Parts, client: EngineClient, address: str) -> None:
        self.parts = parts
        self.client = client
        self.channel = connect(address)
        self.stub = decoder_pb2_grpc.DecoderStub(self.channel)

    @contextmanager
    def held(self, *, after: int = 0) -> Iterator[None]:
        """Inside, the engine computes so many steps and no more."""
        executor, left, go_on = self.parts.executor, [None] * after, threading.Event()
        submit = executor.submit

        def held_back(plan: StepPlan) -> None:
            if left:
                left.pop()
            else:
                go_on.wait()
            submit(plan)

        executor.submit = held_back  # type: ignore[method-assign]
        try:
            yield
        finally:
            go_on.set()

    async def call(self, ids: list[int], request_id: str = "r", **sampling: Any) -> Any:
        call = self.stub.Generate()
        start = decoder_pb2.GenerateStart(
            context=common_pb2.RequestContext(request_id=request_id),
            prompt_token_ids=ids,
            sampling=decoder_pb2.SamplingParams(**sampling),
        )
        await call.write(decoder_pb2.GenerateRequest(start=start))
        return call

    async def generate(self, ids: list[int], **fields: Any) -> list[decoder_pb2.GenerateResponse]:
        call = await self.call(ids, **fields)
        await call.done_writing()
        return [message async for message in messages(call)]

    async def idle(self) -> None:
        await until(lambda: not (self.client.load.running or self.client.num_waiting))


@asynccontextmanager
async def serving(config: DecoderConfig) -> AsyncIterator[Decoder]:
    model = Path(config.model)
    text = read_text_config(model)
    parts = load_parts(config, text, model)
    warm_up(parts.executor, num_blocks=parts.num_blocks, block_size=config.memory.block_size)
    metrics = DecoderMetrics()
    client = client_of(config, parts, metrics)
    core = build_engine(config, parts, client.mailbox, metrics)
    server = Server("127.0.0.1", 0, drain_s=2.0)
    grammars = GrammarCheck(parts.grammars)
    servicer = DecoderServicer(
        grammars=grammars,
        intake=Intake(text, max_model_len=parts.max_model_len, max_choices=8),
        client=client,
        description=describe(config, text, parts, model, server.port),
        slab_page_bytes=parts.rows.row_bytes * config.memory.slab_page_rows,
        slab_pages=parts.slab_pages,
    )
    decoder_pb2_grpc.add_DecoderServicer_to_server(servicer, server.grpc)
    thread = threading.Thread(target=core.run)
    thread.start()
    await server.start((SERVICE_NAME,))
    decoder = Decoder(parts, client, server.address)
    try:
        yield decoder
    finally:
        await decoder.channel.close()
        await server.stop()
        await grammars.close()
        core.stop()
        thread.join()
        parts.executor.close()
        parts.slab.close()


def ids_of(told: list[decoder_pb2.GenerateResponse], choice: int = 0) -> list[int]:
    return [
        token
        for message in told
        if message.HasField("tokens") and message.tokens.choice == choice
        for token in message.tokens.token_ids
    ]
