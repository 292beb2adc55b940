"""Every family's plans and token ids against its reference processor, sizes and clips at random.

The reference draws its own template, tokenizes, and expands placeholders by its own pixels; clips
are given to it as the frames that the plan chose.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from chiasm.plan import Modality
from gateway.media import MediaHeader
from gateway.messages import MediaOptions, MediaPart, Message, Role, TextPart
from gateway.planning import Layout
from gateway.planning.registry import planner_for
from gateway.prompt import PromptBuilder
from tests.families import FAMILIES, Family, save_tiny

from transformers import AutoProcessor  # isort: skip
from transformers.video_utils import VideoMetadata  # isort: skip

NUM_PICTURES = 200
NUM_CLIPS = 40
QUESTION = "What is in the picture?"
pytestmark = pytest.mark.filterwarnings("ignore")


class Served:
    def __init__(self, family: Family, path: Path) -> None:
        self.family = family
        self.planner = planner_for(path)
        self.builder = PromptBuilder(path)
        twin = path / "hf"  # of a layout that transformers does not read
        self.reference: Any = AutoProcessor.from_pretrained(twin if twin.exists() else path)

    def ours(self, headers: list[MediaHeader]) -> tuple[list[int], list[Layout]]:
        layouts = [self.planner.plan(header, MediaOptions(), param="p") for header in headers]
        media = tuple(MediaPart(header.modality, None, b"", "p") for header in headers)
        message = Message(Role.USER, (*media, TextPart(QUESTION)))
        rendered = self.builder.render([message], scripts=[layout.script for layout in layouts])
        expanded = self.builder.expand(rendered, [rows for one in layouts for rows in one.runs])
        for layout, runs in zip(layouts, expanded.runs, strict=True):
            assert sum(map(len, runs)) == layout.num_rows
        return list(expanded.token_ids), layouts

    def theirs(self, kinds: list[str], **media: Any) -> list[int]:
        parts = [{"type": kind} for kind in kinds]
        chat = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
        text = self.reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        made = self.reference(text=[text], return_tensors="pt", **media)
        ids: list[int] = made["input_ids"][0].tolist()
        return ids


# One of those that share processor and template is enough. Qwen2(.5)-VL has tests of its own, since
# it chooses frames otherwise than its reference (test_prompt_tokens.py, test_planning.py).
COVERED = (
    *("Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL MoE", "GLM-4.5V", "InternVL2.5"),
    *("InternVL2.5 (authors')", "InternVL3.5", "InternVL3.5 MoE", "InternVL3.5 MoE (authors')"),
)
NAMES = [name for name in FAMILIES if name not in COVERED]


@pytest.fixture(scope="module", params=NAMES, name="served")
def served_(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    path = save_tiny(request.param, tmp_path_factory.mktemp("tiny"))
    return Served(FAMILIES[request.param], path)


def picture(height: int, width: int) -> MediaHeader:
    return MediaHeader(Modality.IMAGE, "image/png", height, width)


def test_pictures_of_many_sizes(served: Served) -> None:
    draw = random.Random(5)
    for index in range(NUM_PICTURES):
        longest = (40, 200, 450)[index % 3]
        height, width = draw.randint(1, longest), draw.randint(1, longest)
        if max(height, width) / min(height, width) > 200:
            width = height
        ids, _ = served.ours([picture(height, width)])
        drawn = Image.new("RGB", (width, height))
        assert ids == served.theirs(["image"], images=[drawn]), (height, width)


def test_two_pictures_of_different_size(served: Served) -> None:
    ids, _ = served.ours([picture(90, 200), picture(300, 64)])
    drawn = [Image.new("RGB", size) for size in ((200, 90), (64, 300))]
    assert ids == served.theirs(["image", "image"], images=drawn)


def test_many_clips(served: Served) -> None:
    draw = random.Random(9)
    for _ in range(NUM_CLIPS):
        count, fps = draw.randint(2, 60), draw.choice([1, 2, 4, 12.5, 30])
        height, width = draw.randint(20, 160), draw.randint(20, 160)
        times = tuple(index / fps for index in range(count))
        header = MediaHeader(Modality.VIDEO, "video/mp4", height, width, times, count / fps)
        ids, (layout,) = served.ours([header])
        chosen = [*layout.frame_indices]
        if not served.family.fills_up:
            chosen = sorted(set(chosen))
        frames = np.zeros((len(chosen), height, width, 3), np.uint8)
        facts = VideoMetadata(
            total_num_frames=count, fps=fps, duration=count / fps, frames_indices=chosen
        )
        found = served.theirs(
            ["video"], videos=[frames], video_metadata=[facts], do_sample_frames=False
        )
        assert ids == found, (count, fps, height, width)


def test_frames_are_the_reference_sampler_s(served: Served) -> None:
    draw = random.Random(10)
    sampler = served.reference.video_processor
    for _ in range(100):
        count, fps = draw.randint(2, 900), draw.choice([1, 2, 4, 12.5, 25, 30])
        times = tuple(index / fps for index in range(count))
        header = MediaHeader(Modality.VIDEO, "video/mp4", 64, 64, times, count / fps)
        _, (layout,) = served.ours([header])
        facts = VideoMetadata(total_num_frames=count, fps=fps, duration=count / fps)
        expected = [int(index) for index in sampler.sample_frames(facts)]
        expected += expected[-1:] * (len(expected) % 2)  # as it is once it is cut into patches
        assert list(layout.frame_indices) == expected, (count, fps)


def test_one_frame_is_a_clip(served: Served) -> None:
    header = MediaHeader(Modality.VIDEO, "video/mp4", 64, 64, (0.0,), 0.04)
    _, (layout,) = served.ours([header])
    assert set(layout.frame_indices) == {0}
    assert layout.num_rows >= 1
