"""Small files that take gigabytes to decode are refused by their header, or wait their turn."""

from __future__ import annotations

import asyncio
import io
import struct

import pytest
from PIL import Image

from chiasm.config.gateway import MediaConfig
from chiasm.errors import TooLarge
from chiasm.fakes import EncoderFaults, FakeDecoder, FakeEncoder, Script
from chiasm.plan import MediaPlan, Modality
from gateway.media.header import read_header
from gateway.messages import JobDone
from tests.unit.gateway_core.conftest import RigMaker, chat, collect, picture, png
from tests.waiting import until

DEFAULTS = MediaConfig()


def webp(side: int) -> bytes:
    """Two frames of one pixel on a canvas that its header claims: under 200 bytes."""
    file = io.BytesIO()
    frames = [Image.new("RGBA", (16, 16), color) for color in ("#f008", "#00f8")]
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    data = bytearray(file.getvalue())
    at = data.index(b"VP8X") + 12
    data[at : at + 6] = struct.pack("<I", side - 1)[:3] * 2
    return bytes(data)


def decode_bytes(data: bytes, **limits: int) -> int:
    limits = {"max_pixels": DEFAULTS.max_image_pixels, **limits}
    return read_header(data, Modality.IMAGE, param="p", **limits).decode_bytes  # type: ignore[arg-type]


def test_an_animation_of_a_few_bytes_that_claims_a_huge_canvas_is_refused() -> None:
    data = webp(11_000)
    assert len(data) < 300
    with pytest.raises(TooLarge, match="11000x11000 is more than") as caught:
        decode_bytes(data, max_decode_bytes=DEFAULTS.max_decode_bytes)
    assert caught.value.param == "p"
    with pytest.raises(TooLarge, match="7000x7000 .* bytes to decode"):
        decode_bytes(webp(7_000), max_decode_bytes=DEFAULTS.max_decode_bytes)
    assert decode_bytes(webp(6_000), max_decode_bytes=DEFAULTS.max_decode_bytes) < 1 << 30


def test_a_photograph_of_fifty_megapixels_is_within_every_limit() -> None:
    file = io.BytesIO()
    Image.new("RGB", (8192, 6144)).save(file, "JPEG")
    assert decode_bytes(file.getvalue(), max_decode_bytes=DEFAULTS.max_decode_bytes) > 1 << 28


@pytest.mark.parametrize(
    ("kind", "mode", "most"),
    [("PNG", "RGB", 10), ("PNG", "RGBA", 24), ("PNG", "I;16", 36), ("TIFF", "I;16", 36)]
    + [("JPEG", "CMYK", 14), ("WEBP", "RGB", 20), ("WEBP", "RGBA", 32), ("AVIF", "RGB", 20)],
)
def test_cost_depends_on_the_kind_of_picture(kind: str, mode: str, most: int) -> None:
    file = io.BytesIO()
    Image.new(mode, (64, 32)).save(file, kind)
    per_pixel = decode_bytes(file.getvalue()) / (64 * 32)
    assert 4 <= per_pixel <= most


async def test_large_pictures_take_turns_and_small_ones_and_text_do_not_wait(
    make_rig: RigMaker,
) -> None:
    go_on = asyncio.Event()

    async def judge(plan: MediaPlan, media: bytes) -> None:
        await go_on.wait()

    encoder = FakeEncoder(faults=EncoderFaults(judge=judge))
    decoder = FakeDecoder(
        Script(land_when=lambda promise: encoder.made(promise.parts[0].source.encode_id))
    )
    one = decode_bytes(png("red", (560, 560)))
    rig = await make_rig(
        encoders=[encoder], decoders=[decoder], media=MediaConfig(max_decode_bytes=2 * one)
    )
    large = [
        asyncio.create_task(collect(rig.pipeline, chat(picture(png(color, (560, 560))))))
        for color in ("red", "green", "blue", "white")
    ]
    await until(lambda: rig.pipeline.admission.decodes.waiting == 2)
    assert rig.pipeline.admission.decodes.inside == 2 * one
    assert isinstance((await collect(rig.pipeline, chat("text")))[-1], JobDone)
    assert rig.pipeline.admission.decodes.waiting == 2  # text was answered before any of them
    go_on.set()
    for events in await asyncio.gather(*large):
        assert isinstance(events[-1], JobDone)
    rig.pipeline.admission.check()
    assert rig.pipeline.admission.decodes.inside == 0


async def test_memory_for_decoding_is_given_back_before_the_answer_is_written(
    make_rig: RigMaker,
) -> None:
    read = asyncio.Event()

    async def step_when(step: int) -> None:
        if step:
            await read.wait()

    decoder = FakeDecoder(Script(token_ids=tuple(range(40, 50)), step_when=step_when))
    rig = await make_rig(decoders=[decoder])
    events = rig.pipeline.run(chat(picture(png())))
    await anext(events)
    assert rig.pipeline.admission.decodes.inside == 0
    assert rig.pipeline.admission.inflight == 1
    await events.aclose()
    rig.pipeline.admission.check()
