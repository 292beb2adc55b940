"""Deltas that leave at once: all of them, in order, counted, and only while somebody waits."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from chiasm.errors import Internal
from chiasm.fakes import FakeDecoder, Script
from gateway.choices import Choices
from gateway.inbox import Inbox
from gateway.messages import ChatJob, ChoiceDone, Delta, Event, FinishReason, JobDone, Sampling
from gateway.outlet import Outlet
from tests.unit.gateway_core.conftest import Rig, RigMaker, chat
from tests.waiting import until

IDS = tuple(range(64, 90))


class Client:
    """Reads events; once the first has come, deltas come by the outlet while `is_fast`."""

    def __init__(self) -> None:
        self.is_fast = True
        self.outlet = Outlet()
        self.at_once: list[Delta] = []
        self.told: list[Event] = []
        """Everything, however it came."""

    async def read(self, rig: Rig, job: ChatJob) -> None:
        async with aclosing(rig.pipeline.run(job, self.outlet)) as events:
            async for event in events:
                self.told.append(event)
                self.outlet.lead_to(self._take, when=lambda: self.is_fast)

    def _take(self, delta: Delta) -> None:
        self.at_once.append(delta)
        self.told.append(delta)

    def ids(self) -> tuple[int, ...]:
        return tuple(i for e in self.told if isinstance(e, Delta) for i in e.token_ids)


def scripted(**script: object) -> FakeDecoder:
    return FakeDecoder(Script(token_ids=IDS, stop_token_id=None, **script))  # type: ignore[arg-type]


@pytest.mark.parametrize("bundled", [True, False])
async def test_deltas_leave_at_once_and_in_order(make_rig: RigMaker, bundled: bool) -> None:
    client = Client()

    async def once_told(step: int) -> None:
        await until(lambda: len(client.ids()) >= min(step, 20))

    decoder = scripted(step_when=once_told)
    decoder.bundled = bundled
    rig = await make_rig(decoders=[decoder])
    await client.read(rig, chat("x", sampling=Sampling(max_tokens=20)))
    assert client.ids() == IDS[:20]
    assert client.outlet.tokens == len(client.at_once) == 19  # all but the first
    assert isinstance(client.told[-2], ChoiceDone) and isinstance(client.told[-1], JobDone)


async def test_a_client_that_cannot_take_more_gets_the_rest_the_long_way(
    make_rig: RigMaker,
) -> None:
    client = Client()

    async def slower(step: int) -> None:
        client.is_fast = step < 5

    rig = await make_rig(decoders=[scripted(token_s=0.002, step_when=slower)])
    await client.read(rig, chat("x", sampling=Sampling(max_tokens=20)))
    assert client.ids() == IDS[:20]
    assert client.outlet.tokens < 10


async def test_a_stop_string_is_found_and_the_decoder_told(make_rig: RigMaker) -> None:
    decoder = scripted(token_s=0.01)
    rig, client = await make_rig(decoders=[decoder]), Client()
    whole = "".join(rig.pipeline._prompts.vocabulary.bytes_of(i).decode() for i in IDS)
    await client.read(rig, chat("x", sampling=Sampling(max_tokens=26), stop=(whole[9:11],)))
    text = "".join(event.text for event in client.told if isinstance(event, Delta))
    assert text == whole[:9]
    assert ChoiceDone(0, FinishReason.STOP) in client.told
    assert decoder.generations[0].stopped == {0}


async def test_a_decoder_that_dies_is_replaced_behind_an_open_outlet(make_rig: RigMaker) -> None:
    decoders = [scripted(token_s=0.002, die_after=8), scripted(token_s=0.002)]
    rig = await make_rig(decoders=decoders)
    for _ in range(2):  # whichever is asked first
        client = Client()
        await client.read(rig, chat("x", sampling=Sampling(max_tokens=20)))
        assert client.ids() == IDS[:20]


@pytest.mark.parametrize("owner", [Choices, Outlet])
async def test_what_fails_on_the_way_out_fails_its_request_and_is_not_tried_again(
    make_rig: RigMaker, monkeypatch: pytest.MonkeyPatch, owner: type
) -> None:
    """A second try would find the first one's traces: ids and text twice."""
    client = Client()
    name, calls = ("push", 0) if owner is Choices else ("write", 0)
    method = getattr(owner, name)

    def fail_once(*args: object) -> object:
        nonlocal calls
        calls += 1
        done = method(*args)
        if calls == 5:
            raise ValueError("planted")
        return done

    async def once_told(step: int) -> None:
        await until(lambda: len(client.ids()) >= step)

    monkeypatch.setattr(owner, name, fail_once)
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    rig = await make_rig(decoders=[scripted(step_when=once_told)])
    with pytest.raises(Internal, match="internal error"):
        await client.read(rig, chat("x", sampling=Sampling(max_tokens=20)))
    assert calls == 5
    assert len(failures) == 1
    assert client.ids() == IDS[: 4 if owner is Choices else 6]
    await rig.settle()


async def test_what_an_attendant_leaves_or_fails_at_is_the_readers() -> None:
    inbox: Inbox[int] = Inbox()
    seen: list[int] = []
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))

    def attendant(items: list[int]) -> None:
        while items and items[0] < 10:
            seen.append(items.pop(0))
        if items and items[0] == 13:
            raise ValueError("thirteen")

    inbox.attend(attendant)
    for put, left in (((1, 2, 10, 3), [10, 3]), ((4, 13), [13])):
        taking = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        for item in put:
            inbox.put(item)
        assert await taking == left
    assert seen == [1, 2, 4]
    assert len(failures) == 1
