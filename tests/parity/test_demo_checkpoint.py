"""The shipped checkpoint is an ordinary Hugging Face directory that answers its questions right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from chiasm.demo import DemoCase, checkpoint_dir, demo_cases, pictures_dir
from tests import torchvision_ops
from tools.demo_model.answer import Checkpoint, Message, read_media
from tools.demo_model.clipfile import decode_mp4
from tools.demo_model.questions import question

torchvision_ops.declare()
from transformers import AutoModelForImageTextToText, AutoProcessor  # noqa: E402
from transformers.video_utils import VideoMetadata  # noqa: E402

MIB = 1024 * 1024
CASES = demo_cases()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint(checkpoint_dir())


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForImageTextToText.from_pretrained(checkpoint_dir()).eval()


@pytest.fixture(scope="module")
def processor() -> Any:
    return AutoProcessor.from_pretrained(checkpoint_dir())


def test_everything_shipped_is_small() -> None:
    sizes = {path: path.stat().st_size for path in checkpoint_dir().parent.rglob("*.*")}
    assert sum(sizes[path] for path in sizes if path.parent == checkpoint_dir()) <= 12 * MIB
    assert all(sizes[path] < 40 * 1024 for path in sizes if path.parent == pictures_dir())


def test_weights_are_stored_in_bf16_and_loaded_in_fp32(model: Any) -> None:
    with safe_open(checkpoint_dir() / "model.safetensors", framework="pt") as weights:
        kinds = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert kinds == {"BF16"}
    assert model.dtype == torch.float32
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_each_digit_is_one_token(processor: Any) -> None:
    ids = processor.tokenizer.encode("0123456789")
    assert processor.tokenizer.convert_ids_to_tokens(ids) == list("0123456789")


def test_there_are_cases_of_every_kind() -> None:
    assert len(CASES) >= 8
    assert any(case.has_video for case in CASES)
    assert any(len(case.parts) == 2 for case in CASES)
    files = {path.name for path in pictures_dir().iterdir()} - {"cases.json"}
    assert files == {part.name for case in CASES for part in case.parts}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_shipped_case_is_answered_right(checkpoint: Checkpoint, case: DemoCase) -> None:
    parts = (*map(read_media, case.parts), case.question)
    assert checkpoint.answer([Message("user", parts)]) == case.answer


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_reference_processor_leads_to_the_same_answer(
    model: Any, processor: Any, case: DemoCase
) -> None:
    kinds = [{"type": "video" if part.suffix == ".mp4" else "image"} for part in case.parts]
    chat = [{"role": "user", "content": [*kinds, {"type": "text", "text": case.question}]}]
    text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[text], return_tensors="pt", **_media(case.parts))
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    answer = processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == case.answer


def _media(parts: tuple[Path, ...]) -> dict[str, Any]:
    if parts[0].suffix != ".mp4":
        return {"images": [Image.open(part).convert("RGB") for part in parts]}
    clips = [decode_mp4(part.read_bytes()) for part in parts]
    facts = [
        VideoMetadata(total_num_frames=len(frames), fps=fps, duration=len(frames) / fps)
        for frames, fps in clips
    ]
    return {"videos": [frames for frames, _ in clips], "video_metadata": facts}


@pytest.mark.parametrize("task", ["shape and colour", "count"])
def test_unseen_pictures_are_answered_right(checkpoint: Checkpoint, task: str) -> None:
    asked = [question(task, index) for index in range(30)]
    right = sum(checkpoint.answer(each.messages) == each.answer for each in asked)
    assert right / len(asked) >= 0.97
