"""Every architecture says the same on every layout, with any chunks, with and without prefix cache.

A few layouts cover each pair of settings; `--every-layout` (`make parity`) runs them all.
"""

from __future__ import annotations

from functools import cache
from itertools import cycle, product
from pathlib import Path

import pytest
import torch

from tests.families import FAMILIES, save_tiny
from tests.layouts import LaidOut
from tests.parity.harness import Prepared, Served, request
from tests.parity.test_families import PROMPTS

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(600)

LAYERS = 12
CHUNK, WHOLE = 16, 4096
Setting = tuple[int, int, int, int, bool]
"""tp, pp, ep, chunk, prefix cache."""

# One a family, each pair of settings on some family: CI has two cores and little time.
DENSE: tuple[Setting, ...] = (
    (2, 2, 1, CHUNK, True),
    (1, 4, 1, WHOLE, False),
    (2, 1, 1, WHOLE, True),
    (1, 2, 1, CHUNK, False),
)
EXPERTS: tuple[Setting, ...] = ((2, 2, 2, CHUNK, False), (2, 1, 1, WHOLE, True))
DEEPSTACK: Setting = (1, 4, 1, CHUNK, True)
"""Four stages of twelve layers: the first holds just the layers that take deeper features in."""


def every(moe: bool) -> list[Setting]:
    ranks = [(tp, pp, ep) for tp, pp in product((1, 2), (1, 2, 4)) for ep in (1, 2) if ep <= tp]
    return [
        (*layout, chunk, prefix)
        for layout in ranks
        for chunk, prefix in product((CHUNK, WHOLE), (True, False))
        if moe or layout[2] == 1
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = metafunc.config.getoption("--every-layout")
    dense, experts = cycle(DENSE), cycle(EXPERTS)
    cases = []
    for name, family in FAMILIES.items():
        cover = [next(experts if family.moe else dense)] + [DEEPSTACK] * family.deepstack
        cases += [(name, setting) for setting in (every(family.moe) if full else cover)]
    metafunc.parametrize(("name", "setting"), cases, ids=[f"{n}-{s}" for n, s in cases])


@cache
def prepared(directory: Path, name: str) -> tuple[Path, dict[str, Prepared], dict[str, list[int]]]:
    path = save_tiny(name, directory / name.replace(" ", "-"), num_hidden_layers=LAYERS)
    served = Served(name, path)
    made = {key: served.prepare(media) for key, media in PROMPTS.items()}
    made["again"] = made["2 images"]
    return path, made, answers(path, made, (1, 1, 1, WHOLE, False))


def answers(path: Path, made: dict[str, Prepared], setting: Setting) -> dict[str, list[int]]:
    tp, pp, ep, chunk, prefix = setting
    engine = LaidOut(path, tp_size=tp, pp_size=pp, ep_size=ep, chunk=chunk, prefix=prefix)
    try:
        for key, one in made.items():
            engine.put(request(engine, key, one, max_tokens=16))
            if key == "2 images":
                engine.run()  # so that "again" finds its pages
        engine.run()
        return {key: ids for key, (ids,) in engine.answers().items()}
    finally:
        engine.close()


@pytest.fixture(scope="module", name="directory")
def directory_(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deep")


def test_layouts_agree(directory: Path, name: str, setting: Setting) -> None:
    path, made, expected = prepared(directory, name)
    assert len({str(ids) for ids in expected.values()}) >= 4, "prompts are told apart"
    assert answers(path, made, setting) == expected
