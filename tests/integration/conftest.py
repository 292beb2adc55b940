"""The demo system, started once for the integration tests of a worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.integration.stack import Service, Stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Two encoders, a decoder and a gateway as separate processes."""
    running = Stack("demo")
    try:
        running.start_all(2, "--allow-private-media")
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def gateway(stack: Stack) -> Service:
    """The gateway of the stack."""
    return next(s for s in stack.services if s.name == "gateway")


@pytest.fixture(scope="session")
def base_url(gateway: Service) -> str:
    """http://host:port of the REST face."""
    return f"http://{gateway.address}"


@pytest.fixture(scope="session")
def client(base_url: str) -> Iterator[OpenAI]:
    """The unmodified OpenAI SDK."""
    with OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=280) as openai:
        yield openai
