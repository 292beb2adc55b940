"""A fake encoder and a fake decoder as a process of their own, with a real gateway before them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from chiasm.digest import processor_digest, tokenizer_digest
from chiasm.fakes.decoder import FakeDecoder
from chiasm.fakes.encoder import FakeEncoder
from chiasm.fakes.serving import serving
from chiasm.server import until_signal
from chiasm.v1 import common_pb2, decoder_pb2

_FORGET_S = 0.5


async def serve_pair(
    encoder: FakeEncoder, decoder: FakeDecoder, directory: Path, *, max_model_len: int
) -> None:
    """Serves both until SIGTERM as a Qwen2.5-VL of one checkpoint; prints the ready line.

    Args:
        encoder: Makes rows.
        decoder: Items land when the encoder has made their rows, whatever its script says.
        directory: The gateway's checkpoint: it takes only peers that have the same files.
        max_model_len: Of the decoder, tokens.
    """

    async def made(promise: decoder_pb2.Promise) -> None:
        await encoder.made(promise.parts[0].source.encode_id)

    decoder.script.land_when = made
    for peer, role in ((encoder, "encoder"), (decoder, "decoder")):
        peer.description.MergeFrom(
            common_pb2.Description(
                instance_id=role, family="qwen2_5_vl", max_model_len=max_model_len
            )
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
    """Fakes remember every call for tests; here that would be all the memory there is."""
    while True:
        await asyncio.sleep(_FORGET_S)
        encoder.forget()
        decoder.generations[:] = [g for g in decoder.generations if not g.ended]
