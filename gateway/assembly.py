"""Puts a pipeline together from the configuration, and takes it apart at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chiasm.checkpoint import resolve_model
from chiasm.config import GatewayConfig
from chiasm.digest import processor_digest, tokenizer_digest
from chiasm.handshake import Expected
from chiasm.telemetry import GatewayMetrics
from gateway.discovery import Fleet, discovery_for
from gateway.media import Intake
from gateway.pipeline import Pipeline
from gateway.planning import planner_for
from gateway.prompt import PromptBuilder


@asynccontextmanager
async def open_pipeline(
    config: GatewayConfig, *, prompts: PromptBuilder, metrics: GatewayMetrics
) -> AsyncIterator[Pipeline]:
    """A pipeline whose fleet is being looked for; not necessarily ready.

    Raises:
        ValueError: A setting or a checkpoint file that cannot be.
    """
    model_dir = await asyncio.to_thread(resolve_model, config.model)
    planner = planner_for(model_dir)
    expected = Expected(
        family=planner.family,
        processor=processor_digest(model_dir),
        tokenizer=tokenizer_digest(model_dir),
    )
    fleet = Fleet(discovery_for(config), expected)
    intake = Intake(config.media)
    fleet.start()
    try:
        yield Pipeline(
            config,
            fleet=fleet,
            intake=intake,
            planner=planner,
            prompts=prompts,
            processor=expected.processor,
            metrics=metrics,
        )
    finally:
        await fleet.close()
        await intake.close()
