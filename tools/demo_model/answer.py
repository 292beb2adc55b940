"""Asks questions about picture files: of the checkpoint through transformers, or of a server.

Both take the same turns, so that one table can be made for either.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tools.demo_model import spec
from tools.demo_model.batches import UNIT, resized
from tools.demo_model.clipfile import decode_mp4, sample_frames
from tools.demo_model.model import Grid
from tools.demo_model.step import patches_of

MAX_NEW_TOKENS = 48


@dataclass(frozen=True, slots=True)
class MediaFile:
    """The bytes of a picture or clip, with their media type."""

    media_type: str
    content: bytes

    @property
    def is_video(self) -> bool:
        """Tell clips from pictures."""
        return self.media_type.startswith("video/")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat: text and files in order."""

    role: str
    parts: tuple[str | MediaFile, ...]


class Answerer(Protocol):
    """Anything that continues a chat."""

    def answer(self, messages: Sequence[Message]) -> str:
        """Give the assistant's next turn, chosen greedily."""
        ...


def read_media(path: Path) -> MediaFile:
    """Read a shipped file."""
    types = {".png": "image/png", ".jpg": "image/jpeg", ".mp4": "video/mp4"}
    return MediaFile(types[path.suffix], path.read_bytes())


@dataclass(frozen=True, slots=True)
class _Patches:
    values: Tensor
    grid: Grid
    seconds: float

    @property
    def num_tokens(self) -> int:
        return self.values.shape[0] // spec.MERGE**2


def _patches(media: MediaFile) -> _Patches:
    seconds = 0.0
    if media.is_video:
        frames, seconds = sample_frames(*decode_mp4(media.content))
    else:
        frames = [Image.open(io.BytesIO(media.content)).convert("RGB")]
    limit = spec.VIDEO_MAX_PIXELS if media.is_video else spec.MAX_PIXELS
    height, width = resized(frames[0].height, frames[0].width, limit)
    small = [frame.resize((width, height), Image.Resampling.BICUBIC) for frame in frames]
    stacked = torch.from_numpy(np.stack([np.asarray(frame) for frame in small]))
    values, grid = patches_of(stacked[None], noise=0.0)
    if grid[1] * spec.PATCH % UNIT or grid[2] * spec.PATCH % UNIT:
        raise ValueError(f"{grid} is not a whole number of merge units")
    return _Patches(values[0], grid, seconds)


class Checkpoint:
    """The checkpoint in transformers, fp32 on the CPU."""

    def __init__(self, directory: Path) -> None:
        from tests import torchvision_ops

        torchvision_ops.declare()  # transformers imports torchvision wherever it finds it
        from transformers import AutoModelForImageTextToText, AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._model: Any = AutoModelForImageTextToText.from_pretrained(directory).eval()

    def answer(self, messages: Sequence[Message]) -> str:
        """Continue a chat with `generate`."""
        inputs = self._inputs(messages)
        with torch.inference_mode():
            output = self._model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        new_ids = output[0, inputs["input_ids"].shape[1] :]
        return str(self._tokenizer.decode(new_ids, skip_special_tokens=True))

    def _inputs(self, messages: Sequence[Message]) -> dict[str, Tensor]:
        media: dict[str, list[_Patches]] = {"image": [], "video": []}
        chat = []
        for message in messages:
            content: list[dict[str, str]] = []
            for part in message.parts:
                if isinstance(part, str):
                    content.append({"type": "text", "text": part})
                    continue
                kind = "video" if part.is_video else "image"
                media[kind].append(_patches(part))
                content.append({"type": kind})
            chat.append({"role": message.role, "content": content})
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return self._tensors(text, media)

    def _tensors(self, text: str, media: dict[str, list[_Patches]]) -> dict[str, Tensor]:
        for kind, items in media.items():
            pad = f"<|{kind}_pad|>"
            pieces = text.split(pad)
            text = pieces[0]
            for item, piece in zip(items, pieces[1:], strict=True):
                text += pad * item.num_tokens + piece
        ids = torch.tensor([self._tokenizer.encode(text)])
        config = self._model.config
        types = (ids == config.image_token_id).long() + 2 * (ids == config.video_token_id).long()
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs["mm_token_type_ids"] = types
        names = {"image": ("pixel_values", "image_grid_thw")}
        names["video"] = ("pixel_values_videos", "video_grid_thw")
        for kind, items in media.items():
            if items:
                inputs[names[kind][0]] = torch.cat([item.values for item in items])
                inputs[names[kind][1]] = torch.tensor([item.grid for item in items])
        if media["video"]:
            seconds = [item.seconds for item in media["video"]]
            inputs["second_per_grid_ts"] = torch.tensor(seconds)
        return inputs


def _openai_part(part: str | MediaFile) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    encoded = base64.b64encode(part.content).decode("ascii")
    kind = "video_url" if part.is_video else "image_url"
    return {"type": kind, kind: {"url": f"data:{part.media_type};base64,{encoded}"}}


class Endpoint:
    """A running server with OpenAI's chat completions."""

    def __init__(self, base_url: str, *, timeout_s: float = 60.0) -> None:
        self._client = httpx.Client(base_url=base_url.rstrip("/"), timeout=timeout_s)
        self._model = self._client.get("/v1/models").raise_for_status().json()["data"][0]["id"]

    def answer(self, messages: Sequence[Message]) -> str:
        """Continue a chat over HTTP."""
        chat = [
            {"role": message.role, "content": [_openai_part(part) for part in message.parts]}
            if message.role == "user"
            else {"role": message.role, "content": "".join(map(str, message.parts))}
            for message in messages
        ]
        body = {"model": self._model, "messages": chat, "temperature": 0}
        body["max_tokens"] = MAX_NEW_TOKENS
        reply = self._client.post("/v1/chat/completions", json=body).raise_for_status().json()
        return str(reply["choices"][0]["message"]["content"])

    def close(self) -> None:
        """End the connections."""
        self._client.close()
