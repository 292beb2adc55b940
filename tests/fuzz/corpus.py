"""What is mutated: one small file of every accepted kind, in `files/`, and a body of every sort.

`python -m tests.fuzz.corpus` draws the files anew.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

FILES = Path(__file__).with_name("files")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_PICTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "rgb.png": ("PNG", "RGB", {}),
    "rgba.png": ("PNG", "RGBA", {}),
    "palette.png": ("PNG", "P", {}),
    "wide.png": ("PNG", "I;16", {}),
    "interlaced.png": ("PNG", "L", {"optimize": True}),
    "plain.jpg": ("JPEG", "RGB", {}),
    "progressive.jpg": ("JPEG", "RGB", {"progressive": True}),
    "cmyk.jpg": ("JPEG", "CMYK", {}),
    "lossy.webp": ("WEBP", "RGB", {}),
    "animated.webp": ("WEBP", "RGBA", {"save_all": True}),
    "animated.gif": ("GIF", "P", {"save_all": True}),
    "animated.png": ("PNG", "RGB", {"save_all": True}),
    "plain.bmp": ("BMP", "RGB", {}),
    "packed.tiff": ("TIFF", "RGB", {"compression": "tiff_lzw"}),
    "wide.tiff": ("TIFF", "I;16", {}),
    "plain.avif": ("AVIF", "RGB", {}),
}
_CLIPS = {
    "clip.mp4": ("mp4", "mpeg4"),
    "clip.mkv": ("matroska", "mpeg4"),
    "clip.webm": ("webm", "libvpx-vp9"),
    "clip.avi": ("avi", "mpeg4"),
    "clip.ts": ("mpegts", "mpeg2video"),
    "clip.flv": ("flv", "flv1"),
}


def files(*, clips: bool) -> list[bytes]:
    """The files' bytes, pictures or clips."""
    return [
        path.read_bytes()
        for path in sorted(FILES.iterdir())
        if path.stem.startswith("clip") is clips
    ]


def media_body(data: bytes, *, clip: bool, stream: bool) -> dict[str, Any]:
    """A chat about one medium."""
    kind = "video_url" if clip else "image_url"
    uri = "data:;base64," + base64.b64encode(data).decode()
    content = [{"type": kind, kind: {"url": uri}}, {"type": "text", "text": "What is it?"}]
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
        "stream": stream,
    }


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """A route and a body it takes, of every sort."""
    red = media_body((FILES / "rgb.png").read_bytes(), clip=False, stream=False)
    sampling = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "n": 2, "seed": 1,
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1,
        "logprobs": True, "top_logprobs": 2, "stop": ["x"], "min_tokens": 1,
        "logit_bias": {"5": 1}, "stop_token_ids": [3],
        "ignore_eos": True, "priority": 1, "cache_salt": "x", "user": "me", "return_timings": True,
    }  # fmt: skip
    turns = [
        {"role": "system", "content": "Be short."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look"}, {"type": "text", "text": "!"}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
        {"role": "user", "content": "And?"},
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    named = {"name": "s", "schema": schema}
    chat: dict[str, Any] = {"model": "demo", "messages": turns, "max_tokens": 4}
    return [
        (CHAT, chat),
        (CHAT, {**chat, **sampling}),
        (CHAT, {**chat, "stream": True, "stream_options": {"include_usage": True}}),
        (CHAT, {**chat, "tools": [tool], "tool_choice": "none"}),
        (CHAT, {**chat, "response_format": {"type": "json_schema", "json_schema": named}}),
        (CHAT, {**red, "mm_processor_kwargs": {"min_pixels": 784, "max_pixels": 9000}}),
        (CHAT, {**red, "chat_template_kwargs": {"x": 1}}),
        (COMPLETIONS, {"model": "demo", "prompt": "Once", "max_tokens": 4, "logprobs": 1}),
        (COMPLETIONS, {"model": "demo", "prompt": [[5, 6], [7]], "max_tokens": 4, "stream": True}),
        ("/tokenize", {"model": "demo", "prompt": "x <|im_end|>", "parse_special": True}),
        ("/tokenize", {"model": "demo", "messages": turns}),
        ("/detokenize", {"model": "demo", "tokens": [5, 6, 7]}),
    ]  # fmt: skip


def _draw() -> None:
    from tests.unit.gateway_core.clips import clip

    FILES.mkdir(exist_ok=True)
    for name, (kind, mode, options) in _PICTURES.items():
        frames = []
        for colour in ("red", "blue"):
            picture = Image.new("RGB", (40, 36), "white")
            ImageDraw.Draw(picture).ellipse((8, 6, 30, 28), fill=colour)
            frames.append(
                picture.convert("L").convert(mode) if ";" in mode else picture.convert(mode)
            )
        more = {"append_images": frames[1:]} if options.get("save_all") else {}
        buffer = io.BytesIO()
        frames[0].save(buffer, kind, **options, **more)
        (FILES / name).write_bytes(buffer.getvalue())
    for name, (container, codec) in _CLIPS.items():
        (FILES / name).write_bytes(clip(4, container=container, codec=codec))


if __name__ == "__main__":
    _draw()
