"""All three services in the test's process, each on a port of its own; ranks are processes.

They talk as they do between machines. What a test of many layouts saves is importing torch anew
for each, and loading ranks anew for settings that only the engine reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from chiasm.cli.service import parse
from chiasm.config import DecoderConfig, EncoderConfig, GatewayConfig
from decoder_svc import app as decoder
from decoder_svc.assembly import Parts, load_parts, warm_up
from decoder_svc.config import read_text_config
from encoder_svc import worker as encoder
from gateway import app as gateway

_GLANCE_S = 0.02
_READY_S = 180.0


class OneProcess:
    """An encoder of a checkpoint; decoders and gateways come and go beside it.

    Args:
        model: The checkpoint.
    """

    def __init__(self, model: Path) -> None:
        self.model = model
        self.loop = asyncio.Runner()  # the decoder's: uvloop starts its triers by fork, not vfork
        self._text = read_text_config(model)
        self._open = AsyncExitStack()
        self._encoder = ""
        self._layout: tuple[str, ...] = ()
        self._parts: Parts | None = None

    async def start(self) -> None:
        """Starts the encoder."""
        config = self._config(EncoderConfig, "encoder_svc")
        server = encoder.listen(config)
        parts = await asyncio.to_thread(encoder.load_parts, config)
        await self._open.enter_async_context(encoder.running(config, parts, server))
        self._encoder = server.address

    @asynccontextmanager
    async def serving(
        self, layout: tuple[str, ...], settings: tuple[str, ...]
    ) -> AsyncIterator[str]:
        """A decoder and a gateway that serve inside the block; the gateway's address.

        Args:
            layout: The decoder's flags that ranks obey. Those of the same before live on.
            settings: Flags that its engine alone reads.
        """
        config = self._config(DecoderConfig, "decoder_svc", *layout, *settings)
        try:
            parts = await self._load(layout, config)
            server = decoder.listen(config)
            async with decoder.running(config, self._text, parts, self.model, server):
                peers = ("--encoder-urls", self._encoder, "--decoder-urls", server.address)
                door = self._config(GatewayConfig, "gateway", *peers)
                async with gateway.running(door) as face:
                    await _until_ready(f"http://{face.address}/ready")
                    yield face.address
        except BaseException:
            await self._end_ranks()  # whatever they are in, the next is not to meet it
            raise

    async def stop(self) -> None:
        """Ends everything."""
        await self._end_ranks()
        await self._open.aclose()

    async def _load(self, layout: tuple[str, ...], config: DecoderConfig) -> Parts:
        if self._parts is None or layout != self._layout:
            await self._end_ranks()
            parts = await asyncio.to_thread(load_parts, config, self._text, self.model)
            self._layout, self._parts = layout, parts
            await asyncio.to_thread(
                warm_up,
                parts.executor,
                num_blocks=parts.num_blocks,
                block_size=config.memory.block_size,
            )
        return self._parts

    async def _end_ranks(self) -> None:
        parts, self._parts = self._parts, None
        if parts is not None:
            await asyncio.to_thread(parts.executor.close)
            parts.slab.close()

    def _config(self, kind: type, program: str, *flags: str) -> Any:
        """As the command line would have it."""
        return parse(kind, program, ("--model", str(self.model), "--port", "0", *flags), {})


async def _until_ready(url: str) -> None:
    async with asyncio.timeout(_READY_S), httpx.AsyncClient(timeout=60) as client:
        while (await client.get(url)).status_code != 200:
            await asyncio.sleep(_GLANCE_S)
