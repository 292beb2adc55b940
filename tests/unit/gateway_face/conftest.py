"""The REST face over a scripted pipeline."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.unit.gateway_face.scripted import ScriptedPipeline, client_of, make_face


@pytest.fixture
def pipeline() -> ScriptedPipeline:
    return ScriptedPipeline()


@pytest.fixture
async def client(pipeline: ScriptedPipeline) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_face(pipeline)) as found:
        yield found
