"""What may wait for the engine, in pages and in bytes of embeddings."""

from __future__ import annotations

import random

import pytest

from chiasm.config.decoder import MemoryConfig, SchedulerConfig
from chiasm.errors import ResourceExhausted
from chiasm.plan import MediaPlan, Modality, Promise
from decoder_svc.admission import Admission, Place, Room, room_of
from decoder_svc.engine.messages import (
    AddRequest,
    ChoiceDone,
    FinishReason,
    ItemReleased,
    Tokens,
)
from decoder_svc.sampling.params import SamplingParams

ROOM = Room(pages=10, embedding_bytes=1000, block_size=16, row_bytes=10)


def request(tokens: int, *rows: int, resumed: int = 0) -> AddRequest:
    promises = tuple(
        Promise(
            item,
            MediaPlan(b"d" * 32, "f", Modality.IMAGE, 1, 1, 1, 1, (), count, 1, "image/png"),
            0,
            (),
        )
        for item, count in enumerate(rows)
    )
    return AddRequest(
        request_id="r",
        prompt_ids=(1,) * tokens,
        sampling=SamplingParams(max_tokens=1),
        promises=promises,
        resume=((1,) * resumed,) if resumed else (),
    )


def test_pages_are_counted_until_an_answer_begins() -> None:
    admission = Admission(ROOM)
    first = admission.enter(request(17))
    admission.enter(request(100, resumed=28))
    assert admission.waiting_pages == 10
    with pytest.raises(ResourceExhausted, match="10 KV pages") as refused:
        admission.enter(request(1))
    assert refused.value.retry_after_s
    first.heard(Tokens(0, 0, (5,)))
    first.heard(Tokens(0, 1, (6,)))
    assert admission.waiting_pages == 8
    admission.enter(request(32))


def test_embeddings_are_counted_until_they_are_needed_no_more() -> None:
    admission = Admission(ROOM)
    first = admission.enter(request(1, 40, 50))
    assert admission.waiting_bytes == 900
    with pytest.raises(ResourceExhausted, match="900 bytes of embeddings"):
        admission.enter(request(1, 11))
    admission.enter(request(1))  # text goes by
    first.heard(ItemReleased(0, from_prefix_cache=False))
    first.heard(ItemReleased(0, from_prefix_cache=False))
    assert admission.waiting_bytes == 500
    first.leave()
    first.leave()
    assert admission.waiting_bytes == 0


def test_one_alone_may_be_larger_than_all_the_room() -> None:
    admission = Admission(ROOM)
    alone = admission.enter(request(1000, 500))
    with pytest.raises(ResourceExhausted):
        admission.enter(request(1))
    alone.leave()
    admission.enter(request(1))


def test_the_room_follows_from_memory_unless_it_is_said() -> None:
    memory = MemoryConfig(block_size=16, slab_bytes=1 << 20)
    said = SchedulerConfig(max_waiting_tokens=100, max_waiting_embedding_bytes=5000)
    assert room_of(said, memory, pages=50, row_bytes=8) == Room(
        pages=7, embedding_bytes=5000, block_size=16, row_bytes=8
    )
    assert room_of(SchedulerConfig(), memory, pages=50, row_bytes=8) == Room(
        pages=400, embedding_bytes=8 << 20, block_size=16, row_bytes=8
    )
    with pytest.raises(ValueError, match="negative"):
        SchedulerConfig(max_waiting_tokens=-1)


def test_whatever_happens_everything_is_given_back() -> None:
    draw = random.Random(3)
    admission = Admission(ROOM)
    inside: list[tuple[Place, int]] = []
    refused = 0
    for _ in range(2000):
        if inside and draw.random() < 0.6:
            place, items = draw.choice(inside)
            place.heard(
                draw.choice(
                    [
                        Tokens(0, 0, (1,)),
                        ChoiceDone(0, FinishReason.LENGTH),
                        ItemReleased(draw.randrange(items + 1), from_prefix_cache=True),
                    ]
                )
            )
            if draw.random() < 0.3:
                place.leave()
                inside.remove((place, items))
        else:
            rows = [draw.randint(1, 60) for _ in range(draw.randint(0, 3))]
            try:
                place = admission.enter(request(draw.randint(1, 120), *rows))
                inside.append((place, len(rows)))
            except ResourceExhausted:
                refused += 1
        admission.check()
    for place, _ in inside:
        place.leave()
    assert (admission.waiting_pages, admission.waiting_bytes) == (0, 0)
    assert refused > 100
