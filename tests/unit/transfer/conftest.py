"""Which tests run over which transport."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.transfer.loopback import Nixl, Sides


@pytest.fixture
def nixl() -> Iterator[Nixl]:
    """Rows of this test travel by NIXL."""
    ends = Sides.nixl = Nixl()
    yield ends
    ends.close()
    Sides.nixl = None


@pytest.fixture(params=["grpc", "nixl"])
def either(request: pytest.FixtureRequest) -> str:
    """The test runs once over each."""
    if request.param == "nixl":
        request.getfixturevalue("nixl")
    return str(request.param)
