"""A pipeline over fake encoders and decoders behind real ports."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from PIL import Image

from chiasm.checkpoint import resolve_model
from chiasm.config import GatewayConfig
from chiasm.config.gateway import AdmissionConfig, MediaConfig, RoutingConfig
from chiasm.digest import processor_digest, tokenizer_digest
from chiasm.fakes import FakeDecoder, FakeEncoder
from chiasm.fakes.serving import serving
from chiasm.handshake import Expected
from chiasm.plan import Modality
from chiasm.server import Server
from chiasm.telemetry import GatewayMetrics
from chiasm.v1 import common_pb2, decoder_pb2
from gateway.admission import Admission
from gateway.discovery import Fleet, StaticDiscovery
from gateway.media import Intake
from gateway.messages import ChatJob, Event, MediaPart, Message, Role, Sampling, TextPart
from gateway.pipeline import Pipeline
from gateway.planning import planner_for
from gateway.prompt import PromptBuilder
from tests.integration.cluster import free_port
from tests.waiting import until

MODEL_DIR = resolve_model("demo")
EXPECTED = Expected("qwen2_5_vl", processor_digest(MODEL_DIR), tokenizer_digest(MODEL_DIR))


def png(color: str = "red", size: tuple[int, int] = (56, 56)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def picture(data: bytes, index: int = 0) -> MediaPart:
    return MediaPart(Modality.IMAGE, data=data, param=f"messages[0].content[{index}]")


def chat(*parts: Any, sampling: Sampling | None = None, **changes: Any) -> ChatJob:
    parts = tuple(TextPart(p) if isinstance(p, str) else p for p in parts)
    return ChatJob(
        request_id="r1",
        model=changes.pop("model", "demo"),
        messages=(Message(Role.USER, parts),),
        sampling=sampling or Sampling(max_tokens=8),
        **changes,
    )


async def collect(pipeline: Pipeline, job: ChatJob) -> list[Event]:
    async with aclosing(pipeline.run(job)) as events:
        return [event async for event in events]


def _description(role: str, model_len: int) -> common_pb2.Description:
    description = common_pb2.Description(
        instance_id=role, family="qwen2_5_vl", max_model_len=model_len
    )
    description.digests.processor = EXPECTED.processor
    description.digests.tokenizer = EXPECTED.tokenizer
    if role == "decoder":
        description.rows.CopyFrom(FakeEncoder().row_format.to_proto())
    else:
        description.digests.tower = b"tower"
    return description


@dataclass
class Rig:
    """The pipeline, the fakes behind it, and the fleet between."""

    pipeline: Pipeline
    fleet: Fleet
    encoders: list[FakeEncoder]
    decoders: list[FakeDecoder]
    servers: dict[int, Server] = field(default_factory=dict)
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)

    def metric(self, name: str, **labels: str) -> float:
        """A sample of the gateway's metrics; 0 when there is none yet."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def encodes(self) -> int:
        return sum(len(encoder.encodes) for encoder in self.encoders)

    async def settle(self) -> None:
        """Waits until no rpc is open anywhere."""
        await until(
            lambda: (
                not any(
                    [e.open_encodes for e in self.encoders] + [d.running for d in self.decoders]
                )
            )
        )

    async def asked(self, decoder: FakeDecoder, promise: decoder_pb2.Promise) -> None:
        """Waits until encoders have been asked for an item's rows, wherever these come from now.

        No decoder has them sooner, however late the gateway's call comes to its encoder.
        """
        sources = {part.part: (part.attempt, part.source.encode_id) for part in promise.parts}
        first = promise.parts[0].source.encode_id
        (generation,) = (
            g
            for g in decoder.generations
            if first in {p.parts[0].source.encode_id for p in g.start.promises}
        )

        def whole() -> bool:
            for move in generation.redirects:
                if move.item == promise.item:
                    known = sources[move.part]
                    sources[move.part] = max(known, (move.attempt, move.source.encode_id))
            asked = {start.encode_id for encoder in self.encoders for start in encoder.encodes}
            return asked >= {encode_id for _, encode_id in sources.values()}

        await until(whole)


async def never(promise: decoder_pb2.Promise) -> None:
    """Of an item that does not land: `Script.land_when`."""
    await asyncio.Event().wait()


class RigMaker:
    """Makes rigs; everything is taken apart at the end of the test."""

    def __init__(self, stack: AsyncExitStack, prompts: PromptBuilder) -> None:
        self._stack = stack
        self._prompts = prompts

    async def __call__(
        self,
        *,
        encoders: Sequence[FakeEncoder] | int = 1,
        decoders: Sequence[FakeDecoder] | int = 1,
        model_len: int = 4096,
        media: MediaConfig | None = None,
        admission: AdmissionConfig | None = None,
        routing: RoutingConfig | None = None,
        features: Sequence[str] = (),
    ) -> Rig:
        es = [FakeEncoder() for _ in range(encoders)] if isinstance(encoders, int) else encoders
        ds = [FakeDecoder() for _ in range(decoders)] if isinstance(decoders, int) else decoders
        servers = {}
        for peer in (*es, *ds):
            role = "encoder" if isinstance(peer, FakeEncoder) else "decoder"
            server = await self._stack.enter_async_context(serving(peer, port=free_port()))
            servers[id(peer)] = server
            peer.description = _description(role, model_len)
            peer.description.features.extend(features)
            peer.description.advertised_address = server.address
        config = GatewayConfig(
            model="demo",
            media=media or MediaConfig(),
            admission=admission or AdmissionConfig(),
            routing=routing or RoutingConfig(),
        )
        discovery = StaticDiscovery(
            encoders=tuple(servers[id(e)].address for e in es),
            decoders=tuple(servers[id(d)].address for d in ds),
        )
        fleet = Fleet(discovery, EXPECTED)
        intake = Intake(config.media)
        fleet.start()
        self._stack.push_async_callback(intake.close)
        self._stack.push_async_callback(fleet.close)
        metrics = GatewayMetrics()
        pipeline = Pipeline(
            config,
            fleet=fleet,
            intake=intake,
            planner=planner_for(MODEL_DIR),
            prompts=self._prompts,
            processor=EXPECTED.processor,
            admission=Admission(config, metrics=metrics),
        )
        rig = Rig(pipeline, fleet, list(es), list(ds), servers, metrics)
        for decoder in ds:
            asked = partial(rig.asked, decoder)
            decoder.script.land_when = decoder.script.land_when or asked
            decoder.script.landed_when = decoder.script.landed_when or asked
        await until(
            lambda: (
                len(fleet.encoders.endpoints) == len(es)
                and len(fleet.decoders.endpoints) == len(ds)
            )
        )
        return rig


@pytest.fixture(scope="session")
def prompts() -> PromptBuilder:
    return PromptBuilder(MODEL_DIR)


@pytest.fixture
async def make_rig(prompts: PromptBuilder) -> AsyncIterator[RigMaker]:
    async with AsyncExitStack() as stack:
        yield RigMaker(stack, prompts)
