"""One request's events, whichever way its tokens take past a caller that may be slow."""

from __future__ import annotations

import asyncio
import random

import pytest

from chiasm.telemetry import DecoderMetrics
from chiasm.v1 import decoder_pb2
from decoder_svc.engine.client import EngineClient
from decoder_svc.engine.messages import (
    AddRequest,
    ChoiceDone,
    EngineLoad,
    Event,
    FinishReason,
    StepEvents,
    StepTokens,
    Tokens,
)
from decoder_svc.sampling.params import SamplingParams
from decoder_svc.wire import TokenWriter, to_response


def request(name: str) -> AddRequest:
    return AddRequest(request_id=name, prompt_ids=(1,), sampling=SamplingParams(max_tokens=1 << 20))


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(20))
async def test_every_token_arrives_once_and_in_order(seed: int) -> None:
    draw = random.Random(seed)
    client = EngineClient(max_waiting=4, metrics=DecoderMetrics())
    stream = client.open(request("a"))
    heard: list[int] = []
    past: list[int] = []
    has_room = True
    is_open = asyncio.Event()
    is_open.set()

    def shortcut(choice: int, position: int, token_id: int) -> bool:
        assert choice == 0 and token_id == 100 + position
        if has_room:
            heard.append(position)
            past.append(position)
        return has_room

    async def read() -> None:
        events: list[Event] = []
        while not isinstance(events[-1] if events else None, ChoiceDone):
            events = await stream.next()
            for event in events:
                await is_open.wait()
                if isinstance(event, Tokens):
                    heard.extend(range(event.position, event.position + len(event.token_ids)))

    stream.shortcut = shortcut
    reader = asyncio.create_task(read())
    for position in range(300):
        has_room = draw.random() < 0.8
        (is_open.set if draw.random() < 0.7 else is_open.clear)()
        told = StepTokens(
            ("gone", stream.request_id), (0, 0), (position,) * 2, (100 + position,) * 2
        )
        client.mailbox.send(StepEvents((told,)), (), EngineLoad())
        await turns(draw.randrange(5))
    is_open.set()
    done = ChoiceDone(0, FinishReason.LENGTH)
    client.mailbox.send(StepEvents(others=((stream.request_id, done),)), (), EngineLoad())
    await asyncio.wait_for(reader, 60)
    assert heard == list(range(300))
    assert 0 < len(past) < 300
    assert client.admission.waiting_pages == 0
    stream.close()


async def test_room_is_given_back_before_tokens_go_past() -> None:
    client = EngineClient(max_waiting=4, metrics=DecoderMetrics())
    stream = client.open(request("a"))
    stream.shortcut = lambda *_: True
    waiting = asyncio.create_task(stream.next())
    await turns(2)
    assert client.admission.waiting_pages == 1
    told = StepTokens((stream.request_id,), (0,), (0,), (5,))
    client.mailbox.send(StepEvents((told,)), (), EngineLoad())
    assert await waiting == [Tokens(0, 0, (5,))]  # the first goes the long way
    assert client.admission.waiting_pages == 0
    stream.close()


async def test_last_words_of_a_life_that_was_closed_are_not_heard_in_the_next() -> None:
    client = EngineClient(max_waiting=4, metrics=DecoderMetrics())
    first = client.open(request("a"))
    first.close()
    second = client.open(request("a"))
    late = StepTokens((first.request_id,), (0,), (0,), (5,))
    client.mailbox.send(StepEvents((late,)), (), EngineLoad())
    told = StepTokens((second.request_id,), (0,), (0,), (6,))
    client.mailbox.send(StepEvents((told,)), (), EngineLoad())
    await turns(2)
    assert await second.next() == [Tokens(0, 0, (6,))]
    second.close()


def test_a_token_is_serialized_as_any_answer() -> None:
    writer = TokenWriter()
    for choice, position, token_id in ((0, 0, 0), (3, 200, 151_000), (0, 0, 7), (1, 1 << 20, 1)):
        plain = to_response(Tokens(choice, position, (token_id,)))
        written = writer.write(choice, position, token_id)
        assert decoder_pb2.GenerateResponse.FromString(written) == plain
