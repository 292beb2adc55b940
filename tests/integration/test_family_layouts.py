"""Every architecture over the real services on every layout: what the engine alone says.

The other half of tests/parity/test_family_layouts.py: there one process holds all, here rows come
from an encoder. `--every-layout` (`make parity`) runs all of it; CI a few that cover each setting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.families import FAMILIES
from tests.integration.one_process import OneProcess
from tests.integration.test_families import part
from tests.parity.harness import QUESTION, File, Served
from tests.parity.test_families import PROMPTS
from tests.parity.test_family_layouts import CHUNK, WHOLE, Setting, every, prepared

pytestmark = pytest.mark.timeout(900)
NUM_TOKENS = 16
COVER: tuple[tuple[str, Setting], ...] = (
    ("Qwen3-VL MoE", (2, 2, 2, CHUNK, True)),
    ("InternVL2.5 (authors')", (1, 2, 1, WHOLE, False)),
)
WAVES: tuple[dict[str, list[File]], ...] = (
    {key: PROMPTS[key] for key in ("image", "2 images")},
    {"video": PROMPTS["video"], "text only": [], "again": PROMPTS["2 images"]},
)
"""What is asked at once; "again" finds the pages of the wave before."""


class Split:
    """An encoder of one checkpoint, and what a decoder must say."""

    def __init__(self, name: str, directory: Path) -> None:
        path, _, self.expected = prepared(directory, name)
        self.vocabulary = Served(name, path).builder.vocabulary
        self.services = OneProcess(path)
        self.run = self.services.loop.run
        self.run(self.services.start())

    def close(self) -> None:
        """Ends the services."""
        self.run(self.services.stop())
        self.services.loop.close()

    async def answers(self, setting: Setting) -> tuple[dict[str, list[bytes]], int]:
        """What a decoder of this layout says, and how many tokens it has found in its cache."""
        tp, pp, ep, chunk, prefix = setting
        layout = ("--tp-size", str(tp), "--pp-size", str(pp), "--ep-size", str(ep))
        cache = "--prefix-cache" if prefix else "--no-prefix-cache"
        settings = ("--chunked-prefill-size", str(chunk), cache)
        told: dict[str, list[bytes]] = {}
        found = 0
        async with (
            self.services.serving(layout, settings) as address,
            AsyncOpenAI(base_url=f"http://{address}/v1", api_key="-", max_retries=0) as client,
        ):
            for wave in WAVES:
                heard = await asyncio.gather(*(_ask(client, media) for media in wave.values()))
                told.update({key: tokens for key, (tokens, _) in zip(wave, heard, strict=True)})
                found += sum(cached for _, cached in heard)
        return told, found


async def _ask(client: AsyncOpenAI, media: list[File]) -> tuple[list[bytes], int]:
    answer = await client.chat.completions.create(
        model=(await client.models.list()).data[0].id,
        messages=[
            {  # type: ignore[list-item, misc]
                "role": "user",
                "content": [*map(part, media), {"type": "text", "text": QUESTION}],  # type: ignore[arg-type]
            }
        ],
        max_tokens=NUM_TOKENS,
        temperature=0,
        logprobs=True,
        extra_body={"ignore_eos": True},
    )
    logprobs, usage = answer.choices[0].logprobs, answer.usage
    assert logprobs is not None and logprobs.content is not None
    assert usage is not None and usage.prompt_tokens_details is not None
    tokens = [bytes(token.bytes or ()) for token in logprobs.content]
    return tokens, usage.prompt_tokens_details.cached_tokens or 0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases: list[tuple[str, Setting]] = list(COVER)
    if metafunc.config.getoption("--every-layout"):
        cases = [(name, one) for name, family in FAMILIES.items() for one in every(family.moe)]
    metafunc.parametrize(("name", "setting"), cases, ids=[f"{n}-{s}" for n, s in cases])


class Latest:
    """One architecture at a time, as the tests go through them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._name = ""
        self._split: Split | None = None

    def of(self, name: str) -> Split:
        if self._split is None or name != self._name:
            self.close()
            self._name, self._split = name, Split(name, self._directory)
        return self._split

    def close(self) -> None:
        split, self._split = self._split, None
        if split is not None:
            split.close()


@pytest.fixture(scope="module", name="latest")
def latest_(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Latest]:
    latest = Latest(tmp_path_factory.mktemp("split"))
    yield latest
    latest.close()


def test_layouts_agree_over_the_services(latest: Latest, name: str, setting: Setting) -> None:
    split = latest.of(name)
    told, found = split.run(split.answers(setting))
    spell = split.vocabulary.bytes_of
    assert told == {key: [*map(spell, ids)] for key, ids in split.expected.items()}
    assert (found > 0) is setting[-1], "the prefix cache is used where it is on"
