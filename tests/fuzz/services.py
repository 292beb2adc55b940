"""What stands behind a fuzzed gateway: pixels are really decoded, tokens are made up.

Run as `python -m tests.fuzz.services`; prints the ready line.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from chiasm.checkpoint import resolve_model
from chiasm.digest import processor_digest, tokenizer_digest
from chiasm.errors import ChiasmError, InvalidMedia, TooLarge
from chiasm.fakes import EncoderFaults, FakeDecoder, FakeEncoder, Script, serving
from chiasm.plan import Cause, MediaPlan, Span
from chiasm.server import until_signal
from chiasm.v1 import common_pb2, decoder_pb2
from encoder_svc.geometry import resolve_run
from encoder_svc.messages import EncodeJob
from encoder_svc.pixels.settings import read_settings
from encoder_svc.processor import Processor

ANSWER = "a red circle"
_FORGET_S = 0.5


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

    async def land(promise: decoder_pb2.Promise) -> None:
        await encoder.made(promise.parts[0].source.encode_id)

    decoder = FakeDecoder(Script(token_ids=ids, land_when=land))
    for peer, role in ((encoder, "encoder"), (decoder, "decoder")):
        peer.description.MergeFrom(
            common_pb2.Description(instance_id=role, family="qwen2_5_vl", max_model_len=4096)
        )
        peer.description.digests.processor = processor_digest(directory)
        peer.description.digests.tokenizer = tokenizer_digest(directory)
    encoder.description.digests.tower = b"tower"
    decoder.description.rows.CopyFrom(encoder.row_format.to_proto())
    async with serving(encoder) as one, serving(decoder) as other:
        encoder.description.advertised_address = one.address
        decoder.description.advertised_address = other.address
        forgetting = asyncio.create_task(_forget(encoder, decoder))
        print(f"chiasm-ready encoder={one.address} decoder={other.address}", flush=True)
        await until_signal()
        forgetting.cancel()


async def _forget(encoder: FakeEncoder, decoder: FakeDecoder) -> None:
    while True:
        await asyncio.sleep(_FORGET_S)
        encoder.forget()
        decoder.generations[:] = [g for g in decoder.generations if not g.ended]


if __name__ == "__main__":
    asyncio.run(serve())
