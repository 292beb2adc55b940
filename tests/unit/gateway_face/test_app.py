"""The whole gateway on real sockets: streams, disconnects, drain. Encoder and decoder are fakes."""

from __future__ import annotations

import asyncio
import hashlib
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from chiasm.checkpoint import resolve_model
from chiasm.config import GatewayConfig, ServerConfig
from chiasm.digest import tokenizer_digest
from chiasm.errors import Unavailable
from chiasm.fakes import FakeDecoder, Script, serving
from chiasm.v1 import common_pb2
from gateway.api.drain import Gate
from gateway.app import Gateway, running
from tests.unit.gateway_face.scripted import PROMPTS, ScriptedPipeline, chat, make_face
from tests.waiting import until

CHAT = "/v1/chat/completions"


def config(**fields: object) -> GatewayConfig:
    return GatewayConfig(model="demo", server=ServerConfig(port=0), **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def gateway_over(
    pipeline: ScriptedPipeline,
) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    gateway = Gateway(make_face(pipeline), config())
    await gateway.start()
    async with httpx.AsyncClient(base_url=f"http://{gateway.address}", timeout=60) as client:
        yield gateway, client
    await gateway.stop()


async def test_tokens_arrive_as_they_are_made() -> None:
    pipeline = ScriptedPipeline(hold=asyncio.Event())
    async with gateway_over(pipeline) as (_, client):
        async with client.stream("POST", CHAT, json=chat(stream=True)) as answer:
            frames = answer.aiter_text()
            assert '"content":"red"' in await anext(frames)
            assert pipeline.hold is not None
            pipeline.hold.set()
            rest = "".join([frame async for frame in frames])
        assert rest.endswith("data: [DONE]\n\n")
        assert pipeline.ends == ["finished"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("moment", ["before the first event", "after it"])
async def test_a_client_that_goes_cancels_its_run(stream: bool, moment: str) -> None:
    pipeline = ScriptedPipeline()
    if moment == "after it":
        pipeline.hold = asyncio.Event()
    else:
        pipeline.hold_first = asyncio.Event()
    async with gateway_over(pipeline) as (gateway, client):
        task = asyncio.create_task(client.post(CHAT, json=chat(stream=stream)))
        await until(lambda: pipeline.held)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: pipeline.ends)
        assert pipeline.ends == ["cancelled"]
        await until(lambda: gateway.gate.num_inside == 0)
        pipeline.hold = pipeline.hold_first = None
        assert (await client.post(CHAT, json=chat())).status_code == 200


async def test_drain_finishes_what_is_inside_and_refuses_what_comes() -> None:
    pipeline = ScriptedPipeline(hold=asyncio.Event())
    async with gateway_over(pipeline) as (gateway, client):
        inside = asyncio.create_task(client.post(CHAT, json=chat(stream=True)))
        await until(lambda: pipeline.held)
        gateway.refuse()
        draining = asyncio.create_task(gateway.gate.drain(600.0))
        refused = await client.post(CHAT, json=chat())
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "unavailable"
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        assert not draining.done()
        assert pipeline.hold is not None
        pipeline.hold.set()
        assert (await inside).text.endswith("[DONE]\n\n")
        await asyncio.wait_for(draining, 60)
        assert not gateway.gate.expired


async def test_what_outlasts_the_drain_is_told() -> None:
    pipeline = ScriptedPipeline(hold=asyncio.Event())
    async with gateway_over(pipeline) as (gateway, client):
        streamed = asyncio.create_task(client.post(CHAT, json=chat(stream=True)))
        whole = asyncio.create_task(client.post(CHAT, json=chat()))
        await until(lambda: pipeline.held == 2)
        await gateway.gate.drain(0.05)
        text = (await streamed).text
        assert '"code":"unavailable"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert (await whole).status_code == 503
    assert pipeline.ends == ["cancelled", "cancelled"]


async def test_an_empty_gate_drains_at_once() -> None:
    await asyncio.wait_for(Gate().drain(3600), 60)


async def test_a_port_in_use_is_said() -> None:
    pipeline = ScriptedPipeline()
    async with gateway_over(pipeline) as (gateway, _):
        port = int(gateway.address.rpartition(":")[2])
        taken = GatewayConfig(model="demo", server=ServerConfig(port=port))
        with pytest.raises(Unavailable, match="in use"):
            Gateway(make_face(pipeline), taken)


async def test_the_real_pipeline_answers_through_both_ends() -> None:
    decoder = FakeDecoder(
        Script(token_ids=PROMPTS.encode_text("a red circle"), stop_token_id=386),
        description=common_pb2.Description(
            family="qwen2_5_vl",
            max_model_len=512,
            digests=common_pb2.Digests(tokenizer=tokenizer_digest(resolve_model("demo"))),
            rows=common_pb2.RowFormat(hidden_size=8, levels=1, dtype=common_pb2.DTYPE_FLOAT32),
        ),
    )
    async with (
        serving(decoder) as server,
        running(config(decoder_urls=(server.address,))) as gateway,
        httpx.AsyncClient(base_url=f"http://{gateway.address}", timeout=60) as client,
    ):
        body = await answered(client, CHAT, chat(stop="circ"))
        assert body["choices"][0]["message"]["content"] == "a red "
        assert body["choices"][0]["finish_reason"] == "stop"
        body = await answered(client, CHAT, chat(n=2))
        assert [c["message"]["content"] for c in body["choices"]] == ["a red circle"] * 2
        ids = list(PROMPTS.encode_text("x"))
        fields = {"model": "demo", "prompt": ids, "max_tokens": 2}
        body = await answered(client, "/v1/completions", fields)
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["prompt_tokens"] == len(ids)


async def answered(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Comes back as long as it is told to: before the decoder was found, and after this process,
    which both ends share, had no core for so long that the decoder counts as silent."""
    async with asyncio.timeout(60):
        while True:
            reply = await client.post(path, json=body)
            if reply.status_code != 503:
                assert reply.status_code == 200, reply.text
                return dict(reply.json())
            await asyncio.sleep(0.1)


async def test_bad_settings_are_said_at_the_start(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("not a digest\n")
    with pytest.raises(ValueError, match="line 1"):
        async with running(config(decoder_urls=("d:1",), api_key_file=str(keys))):
            pass
    keys.write_text(hashlib.sha256(b"right").hexdigest())
    async with (
        running(config(decoder_urls=("127.0.0.1:9",), api_key_file=str(keys))) as gateway,
        httpx.AsyncClient(base_url=f"http://{gateway.address}", timeout=60) as client,
    ):
        assert (await client.get("/v1/models")).status_code == 401
        headers = {"authorization": "Bearer right"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


def test_the_gateway_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'encoder_svc', 'decoder_svc'):\n"
        "    sys.modules[name] = None\n"
        "import gateway.app\n"
        "from pathlib import Path\n"
        "from chiasm.checkpoint import resolve_model\n"
        "from gateway.prompt import PromptBuilder\n"
        "PromptBuilder(resolve_model('demo'))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)


def test_sigterm_ends_the_process_in_order() -> None:
    command = [sys.executable, "-m", "gateway", "--model", "demo", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--decoder-urls", "127.0.0.1:9"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert re.fullmatch(
            r"chiasm-ready role=gateway address=127\.0\.0\.1:\d+ grpc=127\.0\.0\.1:\d+\n", line
        )
        address = line.split("address=")[1].split()[0]
        assert httpx.get(f"http://{address}/health", timeout=60).status_code == 200
        assert httpx.get(f"http://{address}/ready", timeout=60).status_code == 503
        process.terminate()
        assert process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://{address}/health")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
