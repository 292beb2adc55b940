"""Rows whose placeholders lie in several runs: every place is found, and nonsense is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chiasm.plan import Grid, MediaPlan, Modality, Part, Promise, Source, Span

SOURCE = Source(b"e" * 16, "encoder:1", 1)


def promise(runs: list[tuple[int, int]], rows: int | None = None) -> Promise:
    spans = tuple(Span(begin, end) for begin, end in runs)
    count = sum(map(len, spans)) if rows is None else rows
    plan = MediaPlan(
        digest=b"d" * 32,
        family="f",
        modality=Modality.VIDEO,
        source_height=1,
        source_width=1,
        resized_height=1,
        resized_width=1,
        grids=(Grid(len(runs), 2, 2),),
        num_rows=count,
        media_bytes=1,
        media_type="video/mp4",
    )
    return Promise(0, plan, spans[0].begin, (Part(0, Span(0, count), SOURCE),), spans)


layouts = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=6).map(
    lambda pairs: [
        (begin := sum(gap + size for gap, size in pairs[:index]) + pairs[index][0], begin + size)
        for index, (_, size) in enumerate(pairs)
    ]
)


@given(layouts, st.integers(0, 50), st.integers(0, 50))
def test_rows_and_places(runs: list[tuple[int, int]], begin: int, end: int) -> None:
    made = promise(runs)
    places = [index for first, last in runs for index in range(first, last)]
    assert [made.index_of(row) for row in range(made.plan.num_rows)] == places
    assert made.row_at(begin) == sum(place < begin for place in places)
    assert made.prompt_end == places[-1] + 1
    found = {
        index + step: rows.begin + step
        for index, rows in made.stretches(begin, end)
        for step in range(len(rows))
    }
    assert found == {place: row for row, place in enumerate(places) if begin <= place < end}


@given(layouts)
def test_the_wire_keeps_them(runs: list[tuple[int, int]]) -> None:
    made = promise(runs)
    assert Promise.from_proto(made.to_proto()) == made


@pytest.mark.parametrize(
    ("runs", "rows", "offset", "message"),
    [
        ([(3, 5), (4, 6)], None, 3, "overlap"),
        ([(6, 8), (3, 5)], None, 6, "overlap"),
        ([(3, 5), (6, 8)], None, 2, "prompt_offset"),
        ([(3, 5), (6, 6)], None, 3, "placeholders for 2 rows"),
        ([(3, 5), (6, 8)], 5, 3, "placeholders for 4 rows"),
    ],
)
def test_runs_that_make_no_sense(
    runs: list[tuple[int, int]], rows: int | None, offset: int, message: str
) -> None:
    wire = promise(runs, rows).to_proto()
    wire.prompt_offset = offset
    with pytest.raises(ValueError, match=message):
        Promise.from_proto(wire)
