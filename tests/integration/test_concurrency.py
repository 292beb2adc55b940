"""Neighbours in a batch never matter, and aborted requests leave nothing behind."""

from __future__ import annotations

import asyncio
import random

import httpx

from tests.integration.asking import empty
from tests.integration.cluster import scrape
from tests.integration.media import circle, clip, data_uri, image_part, text_part

QUESTION = text_part("What is in the picture?")
COLOURS = ("red", "green", "blue", "yellow", "orange", "purple")


def request(index: int) -> dict[str, object]:
    picture = image_part(circle(COLOURS[index % 6], (112 + 28 * (index % 4), 140)))
    question = text_part("What is in the picture?")
    kinds: list[list[object]] = [
        [picture, question],
        [text_part(f"Who are you? {index}")],
        [picture, image_part(circle(COLOURS[(index + 2) % 6])), question],
        [
            {"type": "video_url", "video_url": {"url": data_uri(clip(4 + index % 3), "video/mp4")}},
            text_part("Which way does the object move?"),
        ],
    ]
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": kinds[index % 4]}],
        "temperature": 0,
        "max_tokens": 24,
        "ignore_eos": True,
    }


async def answer(client: httpx.AsyncClient, base_url: str, index: int) -> str:
    response = await client.post(f"{base_url}/v1/chat/completions", json=request(index))
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


async def test_sixteen_mixed_requests_at_once_equal_one_by_one(base_url: str) -> None:
    async with httpx.AsyncClient(timeout=180) as client:
        serial = [await answer(client, base_url, index) for index in range(16)]
        together = await asyncio.gather(*(answer(client, base_url, i) for i in range(16)))
    assert list(together) == serial


async def test_aborts_at_any_stage_leave_nothing_behind(base_url: str) -> None:
    draw = random.Random(7)
    async with httpx.AsyncClient(timeout=180) as client:

        async def abort(index: int) -> None:
            task = asyncio.create_task(answer(client, base_url, index))
            await asyncio.sleep(draw.random() * 0.15)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for start in range(0, 60, 10):
            await asyncio.gather(*(abort(start + i) for i in range(10)))
        before = await answer(client, base_url, 0)

        def held() -> dict[str, float]:
            samples = scrape(f"{base_url}/metrics")
            names = ("chiasm_num_requests_running", "chiasm_media_bytes")
            return {name: samples[name] for name in names if samples[name]}

        await empty(held)
        assert await answer(client, base_url, 0) == before


async def test_the_prefix_cache_never_serves_another_picture(base_url: str) -> None:
    async with httpx.AsyncClient(timeout=180) as client:
        seen = []
        for colour in ("red", "blue", "red"):
            body = {
                "model": "demo",
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            image_part(circle(colour)),
                            text_part("What is in the picture?"),
                        ],
                    }
                ],
                "temperature": 0,
                "max_tokens": 24,
            }
            response = await client.post(f"{base_url}/v1/chat/completions", json=body)
            seen.append(response.json()["choices"][0]["message"]["content"])
    assert "red" in seen[0] and "blue" in seen[1] and seen[0] == seen[2]
