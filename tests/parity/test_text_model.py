"""Our Qwen2.5-VL text model gives the reference's logits and greedy answers, in float32.

Rows come from the reference's own tower, so that only the language model is on trial.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chiasm.plan import Grid, Modality
from decoder_svc.config import read_text_config
from decoder_svc.models.mrope import prompt_positions
from tests.checkpoints import save_tiny_qwen
from tests.unit.decoder.rig import Medium, Rig, make_request, promise_of

torch.set_num_threads(1)
from transformers import Qwen2_5_VLForConditionalGeneration  # noqa: E402

PATCH = 3 * 2 * 14 * 14
CHECKPOINTS = {
    "tied, 2 KV heads": {"tied": True, "kv_heads": 2},
    "untied, 2 KV heads": {"tied": False, "kv_heads": 2},
    "tied, 4 KV heads": {"tied": True, "kv_heads": 4},
    "untied, 4 KV heads": {"tied": False, "kv_heads": 4},
}
STILL = Modality.IMAGE
CLIP = Modality.VIDEO
PROMPTS: dict[str, list[Any]] = {
    "text only": [*range(40, 70)],
    "a picture of 28x28": [40, 41, (STILL, Grid(1, 2, 2), 0.0), 50, 51],
    "four pictures": [
        40,
        (STILL, Grid(1, 4, 4), 0.0),
        41,
        (STILL, Grid(1, 6, 4), 0.0),
        42,
        43,
        (STILL, Grid(1, 4, 10), 0.0),
        44,
        (STILL, Grid(1, 2, 2), 0.0),
        45,
    ],
    # 17 frames are 18 after the last one is repeated: 9 temporal patches.
    "a clip of 17 frames": [40, 41, (CLIP, Grid(9, 4, 6), 1.0), 50, 51, 52],
    "a clip whose time outruns its sides": [40, (CLIP, Grid(9, 4, 4), 3.7), 50, 51, 52],
    "a clip between pictures": [
        40,
        (STILL, Grid(1, 4, 4), 0.0),
        41,
        (CLIP, Grid(3, 4, 4), 0.7),
        42,
        (STILL, Grid(1, 2, 4), 0.0),
        43,
    ],
}


@dataclass
class Case:
    prompt: list[int | Medium]
    inputs: dict[str, Any]


@pytest.fixture(scope="module", params=CHECKPOINTS, name="served")
def served_(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    path = save_tiny_qwen(tmp_path_factory.mktemp("tiny"), **CHECKPOINTS[request.param])
    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    return path, reference.eval()


def make_case(reference: Any, pieces: list[Any]) -> Case:
    """The prompt for us (ids and rows) and the same for the reference (ids and patches)."""
    generator = torch.Generator().manual_seed(7)
    prompt: list[int | Medium] = []
    ids: list[int] = []
    types: list[int] = []
    pixels: dict[Modality, list[torch.Tensor]] = {STILL: [], CLIP: []}
    grids: dict[Modality, list[list[int]]] = {STILL: [], CLIP: []}
    seconds: list[float] = []
    for index, piece in enumerate(pieces):
        if isinstance(piece, int):
            prompt.append(piece)
            ids.append(piece)
            types.append(0)
            continue
        modality, grid, per_grid = piece
        patches = torch.randn(grid.t * grid.h * grid.w, PATCH, generator=generator)
        shape = torch.tensor([[grid.t, grid.h, grid.w]])
        with torch.inference_mode():
            rows = reference.model.visual(patches, grid_thw=shape).pooler_output
        prompt.append(Medium(grid, rows, modality, per_grid, name=f"{index:032d}"))
        pad = reference.config.image_token_id
        if modality is CLIP:
            pad = reference.config.video_token_id
            seconds.append(per_grid)
        ids += [pad] * len(rows)
        types += [2 if modality is CLIP else 1] * len(rows)
        pixels[modality].append(patches)
        grids[modality].append([grid.t, grid.h, grid.w])
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        "mm_token_type_ids": torch.tensor([types], dtype=torch.int),
    }
    if pixels[STILL]:
        inputs["pixel_values"] = torch.cat(pixels[STILL])
        inputs["image_grid_thw"] = torch.tensor(grids[STILL])
    if pixels[CLIP]:
        inputs["pixel_values_videos"] = torch.cat(pixels[CLIP])
        inputs["video_grid_thw"] = torch.tensor(grids[CLIP])
        inputs["second_per_grid_ts"] = torch.tensor(seconds)
    return Case(prompt, inputs)


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_and_greedy_tokens_equal_the_reference(served: tuple[Path, Any], name: str) -> None:
    path, reference = served
    case = make_case(reference, PROMPTS[name])
    rig = Rig(path, chunk_tokens=16, segment_rows=7)
    ours = rig.generate(prompt=case.prompt, encoder=rig.encoder, max_tokens=64)
    text = read_text_config(path)
    with torch.inference_mode():
        theirs = reference.generate(
            **case.inputs,
            max_new_tokens=64,
            do_sample=False,
            suppress_tokens=list(text.masked_token_ids),
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = theirs.sequences[0, case.inputs["input_ids"].shape[1] :].tolist()
    assert ours.tokens() == tokens
    for mine, other in zip(rig.sampler.seen, theirs.logits, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in PROMPTS if name != "text only"])
def test_positions_equal_the_reference(served: tuple[Path, Any], name: str) -> None:
    path, reference = served
    text = read_text_config(path)
    case = make_case(reference, PROMPTS[name])
    kept = {k: v for k, v in case.inputs.items() if not k.startswith("pixel")}
    positions, _ = reference.model.get_rope_index(**kept)
    request = make_request(text, "r", prompt=case.prompt)
    mine = np.frombuffer(request.grid_positions, dtype=np.int32).reshape(3, -1)
    np.testing.assert_array_equal(mine, positions[:, 0].numpy())
    # The answer goes on where the prompt's text ends, as in the reference's generate().
    assert len(request.prompt_ids) + request.position_delta == int(positions[0, 0, -1]) + 1


@pytest.mark.parametrize("seconds", [0.1, 0.3, 1 / 3, 0.7, 1.1, 2.3])
def test_clip_time_is_floored_as_the_reference_floors_it(
    served: tuple[Path, Any], seconds: float
) -> None:
    path, reference = served
    text = read_text_config(path)
    grid = Grid(64, 2, 2)
    theirs, _ = reference.model.get_rope_index(
        torch.full((1, 64), text.video_token_id),
        torch.full((1, 64), 2),
        video_grid_thw=torch.tensor([[64, 2, 2]]),
        second_per_grid_ts=torch.tensor([seconds]),
    )
    promise = promise_of(Medium(grid, torch.zeros(64, 1), CLIP, seconds), 0, 0)
    mine = prompt_positions(
        64, [promise], merge=text.spatial_merge_size, tokens_per_second=text.tokens_per_second
    )
    np.testing.assert_array_equal(mine.grid, theirs[:, 0].numpy())
