"""`chiasm up --tp-size 2 --mm-enable-dp-encoder`: an encoder beside each rank, one system."""

from __future__ import annotations

import asyncio

from chiasm.cli.client import Client, user_message
from chiasm.cli.machine import Layout, Machine
from chiasm.demo.cases import DemoCase, demo_cases


async def test_an_encoder_beside_each_rank_and_answers_as_ever() -> None:
    logs: list[tuple[str, str]] = []
    layout = Layout(tp_size=2, mm_enable_dp_encoder=True, port=0, drain_s=2.0)
    async with Machine(layout, lambda name, line: logs.append((name, line))) as machine:
        addresses = await machine.start()
        async with Client(addresses.url) as client:
            model = await client.model()

            async def ask(case: DemoCase) -> str:
                message = user_message(case.parts, case.question)
                request = {"model": model, "messages": [message], "temperature": 0}
                return (await client.answer(request)).text

            cases = demo_cases()
            assert await asyncio.gather(*map(ask, cases)) == [case.answer for case in cases]
    ready = {name for name, line in logs if "vision tower ready" in line}
    assert ready == {"encoder-0", "encoder-1"}
