"""What stands behind a fuzzed gateway: pixels are really decoded, tokens are made up.

Run as `python -m tests.fuzz.services`; prints the ready line.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from chiasm.checkpoint import resolve_model
from chiasm.errors import ChiasmError, InvalidMedia, TooLarge
from chiasm.fakes import EncoderFaults, FakeDecoder, FakeEncoder, Script, serve_pair
from chiasm.plan import Cause, MediaPlan, Span
from encoder_svc.geometry import resolve_run
from encoder_svc.messages import EncodeJob
from encoder_svc.pixels.settings import read_settings
from encoder_svc.processor import Processor

ANSWER = "a red circle"


class Judge:
    """Decodes media as the encoder does, up to the patches; counts what it could not explain."""

    def __init__(self) -> None:
        self._processor = Processor(*read_settings(resolve_model("demo")))
        self._threads = ThreadPoolExecutor(2)

    async def __call__(self, plan: MediaPlan, media: bytes) -> Cause | None:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._decode, plan, media)

    def _decode(self, plan: MediaPlan, media: bytes) -> Cause | None:
        rows = Span(0, plan.num_rows)
        job = EncodeJob(plan.digest, plan, None, rows, media)
        units = resolve_run(self._processor.geometry, plan, None, rows).units()
        try:
            for _ in self._processor.prepare(job, units, threading.Event()):
                pass
        except TooLarge:
            return Cause.TOO_LARGE
        except InvalidMedia:
            return Cause.INVALID_MEDIA
        except ChiasmError:
            return Cause.LOST
        return None


async def serve() -> None:
    """An encoder and a decoder until SIGTERM."""
    from gateway.prompt import PromptBuilder  # the tokenizer: what the decoder says is text

    directory = resolve_model("demo")
    ids = PromptBuilder(directory).encode_text(ANSWER)
    encoder = FakeEncoder(faults=EncoderFaults(judge=Judge()))
    decoder = FakeDecoder(Script(token_ids=ids))
    await serve_pair(encoder, decoder, directory, max_model_len=4096)


if __name__ == "__main__":
    asyncio.run(serve())
