"""2,000 damaged bodies and files, seeded: no 5xx, no hang, flat memory. `make fuzz` sends more."""

from __future__ import annotations

import pytest

from tests.fuzz.campaign import Campaign, target
from tests.fuzz.corpus import FILES, bodies, files
from tests.fuzz.mutate import Mutator

INPUTS = 2000


def test_the_corpus_is_small_and_mutations_are_seeded() -> None:
    assert sum(path.stat().st_size for path in FILES.iterdir()) < 64 << 10
    pictures = files(clips=False)
    assert len(pictures) + len(files(clips=True)) >= 20

    def drawn(seed: int) -> list[bytes]:
        mutator = Mutator(seed)
        return [mutator.file(pictures) for _ in range(50)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert sum(data not in pictures for data in drawn(1)) > 25
    before = repr(bodies())
    mutator = Mutator(3)
    changed = [mutator.json([body]) for _, body in bodies() * 10]
    assert repr(bodies()) == before
    assert sum(body not in [b for _, b in bodies()] for body in changed) > len(changed) // 2


@pytest.mark.timeout(900)
async def test_damaged_inputs_are_refused_and_nothing_else_happens() -> None:
    async with target() as at:
        found = await Campaign(at, seed=1, inputs=INPUTS).run()
    found.check()
    assert found.goods == 2 * INPUTS // 500
    assert found.statuses[200] > INPUTS // 20  # some damage does no harm
    assert found.statuses[400] > INPUTS // 4
    assert sum(found.statuses.values()) == INPUTS
