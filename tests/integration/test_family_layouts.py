"""Every architecture over the real services on every layout: what the engine alone says.

The other half of tests/parity/test_family_layouts.py: there one process holds all, here rows come
from an encoder. `--every-layout` (`make parity`) runs all of it; CI a few that cover each setting.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.families import FAMILIES
from tests.integration.stack import Stack
from tests.integration.test_families import part
from tests.parity.harness import QUESTION, File, Served
from tests.parity.test_families import PROMPTS
from tests.parity.test_family_layouts import CHUNK, WHOLE, Setting, every, prepared

pytestmark = pytest.mark.timeout(400)
NUM_TOKENS = 16
COVER: tuple[tuple[str, Setting], ...] = (
    ("Qwen3-VL MoE", (2, 2, 2, CHUNK, True)),
    ("InternVL2.5 (authors')", (1, 2, 1, WHOLE, False)),
)


class Split:
    """An encoder of one checkpoint, and what a decoder must say."""

    def __init__(self, name: str, directory: Path) -> None:
        path, _, self.expected = prepared(directory, name)
        self.vocabulary = Served(name, path).builder.vocabulary
        self.stack = Stack(path)
        self.encoder = self.stack.start("encoder_svc")

    def answers(self, setting: Setting) -> dict[str, list[bytes]]:
        """Starts a decoder of this layout and a gateway, asks, and stops them."""
        tp, pp, ep, chunk, prefix = setting
        stack = Stack(self.stack.model)
        try:
            decoder = stack.start(
                "decoder_svc",
                *("--tp-size", str(tp), "--pp-size", str(pp), "--ep-size", str(ep)),
                *("--chunked-prefill-size", str(chunk)),
                "--prefix-cache" if prefix else "--no-prefix-cache",
            )
            peers = ("--encoder-urls", self.encoder.wait_ready().address)
            address = decoder.wait_ready(150).address
            gateway = stack.start("gateway", *peers, "--decoder-urls", address).wait_ready()
            client = OpenAI(base_url=f"http://{gateway.address}/v1", api_key="-", max_retries=0)
            model = client.models.list().data[0].id
            asked = {**PROMPTS, "again": PROMPTS["2 images"]}
            return {key: self._ask(client, model, media) for key, media in asked.items()}
        finally:
            stack.stop()

    def _ask(self, client: OpenAI, model: str, media: list[File]) -> list[bytes]:
        answer = client.chat.completions.create(
            model=model,
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
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        return [bytes(token.bytes or ()) for token in logprobs.content]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "setting" not in metafunc.fixturenames:
        return
    cases: list[tuple[str, Setting]] = list(COVER)
    if metafunc.config.getoption("--every-layout"):
        cases = [(name, one) for name, family in FAMILIES.items() for one in every(family.moe)]
    ids = [f"{name}-{setting}" for name, setting in cases]
    metafunc.parametrize(("split", "setting"), cases, ids=ids, indirect=["split"], scope="module")


@pytest.fixture(scope="module", name="split")
def split_(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Split]:
    split = Split(request.param, tmp_path_factory.mktemp("split"))
    yield split
    split.stack.stop()


def test_layouts_agree_over_the_services(split: Split, setting: Setting) -> None:
    told = split.answers(setting)
    spell = split.vocabulary.bytes_of
    assert told == {key: [*map(spell, ids)] for key, ids in split.expected.items()}
