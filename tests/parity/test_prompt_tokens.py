"""Token ids of whole prompts against the reference processor, sizes and clips drawn at random.

The reference draws its own template, tokenizes, and expands placeholders by its own pixels; clips
are given to it as the frames that the plan chose.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from chiasm.checkpoint import resolve_model
from chiasm.plan import Modality
from gateway.media import MediaHeader
from gateway.messages import MediaOptions, MediaPart, Message, Role, TextPart
from gateway.planning.registry import planner_for
from gateway.prompt import PromptBuilder
from tests import torchvision_ops

torchvision_ops.declare()
from transformers import AutoProcessor  # noqa: E402

DEMO = resolve_model("demo")
QUESTION = "What is in the picture?"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", name="reference")
def reference_() -> Any:
    return AutoProcessor.from_pretrained(DEMO)


def ours(header: MediaHeader) -> tuple[list[int], tuple[int, ...]]:
    """Our ids, and the frames our plan takes."""
    layout = planner_for(DEMO).plan(header, MediaOptions(), param="p")
    builder = PromptBuilder(DEMO)
    parts = (MediaPart(header.modality, None, b"", "p"), TextPart(QUESTION))
    rendered = builder.render([Message(Role.USER, parts)])
    return list(builder.expand(rendered, [layout.num_rows]).token_ids), layout.frame_indices


def theirs(reference: Any, kind: str, **media: Any) -> list[int]:
    chat = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": QUESTION}]}]
    text = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return reference(text=[text], return_tensors="np", **media)["input_ids"][0].tolist()


def test_pictures_of_200_sizes(reference: Any) -> None:
    draw = random.Random(5)
    for index in range(200):
        longest = (40, 400, 900)[index % 3]
        height, width = draw.randint(1, longest), draw.randint(1, longest)
        if max(height, width) / min(height, width) > 200:
            width = height
        ids, _ = ours(MediaHeader(Modality.IMAGE, "image/png", height, width))
        picture = Image.new("RGB", (width, height))
        assert ids == theirs(reference, "image", images=[picture]), (height, width)


def test_50_clips(reference: Any) -> None:
    draw = random.Random(9)
    for _ in range(50):
        count, fps = draw.randint(1, 24), draw.choice([1, 2, 4, 12.5])
        height, width = draw.randint(20, 160), draw.randint(20, 160)
        times = tuple(index / fps for index in range(count))
        header = MediaHeader(Modality.VIDEO, "video/mp4", height, width, times, count / fps)
        ids, chosen = ours(header)
        frames = np.zeros((len(chosen), height, width, 3), np.uint8)
        found = theirs(reference, "video", videos=[frames], do_sample_frames=False)
        assert ids == found, (count, fps, height, width)
