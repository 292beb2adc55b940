"""Every architecture, files to tokens, against transformers. Float32 on CPU, small random weights.

The table of the largest differences is printed at the end of the run; `make parity` writes it to
docs/parity.md.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from chiasm.plan import Modality
from decoder_svc.config import read_text_config
from gateway.planning.registry import planner_for
from tests.families import FAMILIES, save_tiny
from tests.integration.media import circle, clip, encode
from tests.parity.harness import NUM_TOKENS, File, Prepared, Served, request
from tests.unit.decoder.rig import Rig

torch.set_num_threads(1)

TOLERANCE = 1e-4


def picture(width: int, height: int, colour: str = "red") -> File:
    return Modality.IMAGE, encode(circle(colour, (width, height)))


PROMPTS: dict[str, list[File]] = {
    "image": [picture(300, 180)],
    "2 images": [picture(224, 224), picture(112, 300, "blue")],
    "video": [(Modality.VIDEO, clip(17, fps=2))],
    "text only": [],
}


@pytest.fixture(scope="module", params=FAMILIES, name="served")
def served_(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(request.param, save_tiny(request.param, tmp_path_factory.mktemp("tiny")))


def new_rig(served: Served) -> Rig:
    return Rig(served.path, chunk_tokens=48, num_blocks=512, page_rows=64, segment_rows=100)


def test_gateway_tower_and_text_model_are_of_one_name(served: Served) -> None:
    """The gateway takes no peer of another family."""
    names = {planner_for(served.path).family, served.runner.family}
    assert names == {read_text_config(served.path).family}


@pytest.mark.parametrize("name", PROMPTS)
def test_files_to_tokens(
    served: Served, name: str, record_property: Callable[[str, object], None]
) -> None:
    made = served.prepare(PROMPTS[name])
    worst_rows = worst([*zip(made.rows, served.reference_rows(made), strict=True)])
    rig = new_rig(served)
    rig.put(request(rig, "r", made))
    got = rig.run("r").tokens()
    expected, logits = served.reference_answer(made, rig.text.masked_token_ids)
    worst_logits = worst([(torch.cat(rig.sampler.seen), logits)])
    record(record_property, served, name, made, worst_rows, worst_logits, got, expected)
    assert worst_rows <= TOLERANCE
    assert worst_logits <= TOLERANCE
    assert got == expected


def test_text_and_picture_in_one_batch(
    served: Served, record_property: Callable[[str, object], None]
) -> None:
    rig = new_rig(served)
    prompts = {name: served.prepare(PROMPTS[name]) for name in ("text only", "image")}
    for name, made in prompts.items():
        rig.put(request(rig, name, made))
    rig.run(*prompts)
    for name, made in prompts.items():
        expected, _ = served.reference_answer(made, rig.text.masked_token_ids)
        assert rig.outcomes[name].tokens() == expected, name
    made, got = prompts["image"], rig.outcomes["image"].tokens()
    record(record_property, served, "text + image", made, 0.0, 0.0, got, got)


def worst(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    return max((float((ours - theirs).abs().max()) for ours, theirs in pairs), default=0.0)


def record(  # noqa: PLR0913, PLR0917
    record_property: Callable[[str, object], None],
    served: Served,
    name: str,
    made: Prepared,
    rows: float,
    logits: float,
    got: list[int],
    expected: list[int],
) -> None:
    same = sum(a == b for a, b in zip(got, expected, strict=True))
    record_property(
        "parity",
        f"{served.name:28} {name:15} {len(made.ids):6d} {rows:9.1e} {logits:9.1e} "
        f"{same:6d}/{NUM_TOKENS}",
    )
