"""Every architecture over the real services: what REST answers is what the engine alone answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import OpenAI

from chiasm.plan import Modality
from tests.families import FAMILIES, save_tiny
from tests.integration.media import data_uri
from tests.integration.stack import Stack
from tests.parity.harness import QUESTION, File, Served, request
from tests.parity.test_families import PROMPTS
from tests.unit.decoder.rig import Rig

pytestmark = pytest.mark.timeout(600)
NUM_TOKENS = 24


def part(file: File) -> dict[str, object]:
    kind, media_type = (
        ("image", "image/png") if file[0] is Modality.IMAGE else ("video", "video/mp4")
    )
    return {"type": f"{kind}_url", f"{kind}_url": {"url": data_uri(file[1], media_type)}}


# One of each way that media take through the services; `--every-layout` runs all families.
COVER = ("Qwen2-VL", "Qwen3-VL MoE", "GLM-4.6V-Flash", "InternVL3 (authors')")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = metafunc.config.getoption("--every-layout")
    metafunc.parametrize("name", FAMILIES if full else COVER)


def test_rest_answers_what_the_engine_answers(name: str, tmp_path: Path) -> None:
    path = save_tiny(name, tmp_path / "tiny")
    served = Served(name, path)
    stack = Stack(path)
    try:
        gateway = stack.start_all(1)
        client = OpenAI(base_url=f"http://{gateway.address}/v1", api_key="-", max_retries=0)
        model = client.models.list().data[0].id
        for key, media in PROMPTS.items():
            made = served.prepare(media)
            rig = Rig(path, num_blocks=512, page_rows=64)
            rig.put(request(rig, "r", made, max_tokens=NUM_TOKENS))
            content = [*map(part, media), {"type": "text", "text": QUESTION}]
            answer = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": content}],  # type: ignore[list-item, misc]
                max_tokens=NUM_TOKENS,
                temperature=0,
                logprobs=True,
                extra_body={"ignore_eos": True},
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(made.ids), key
            assert answer.usage.completion_tokens == NUM_TOKENS
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None and logprobs.content is not None
            told = [bytes(token.bytes or ()) for token in logprobs.content]
            expected = [served.builder.vocabulary.bytes_of(i) for i in rig.run("r").tokens()]
            assert told == expected, key
    finally:
        stack.stop()
