"""Models, tokenizer, readiness, metrics and the description of the API."""

from __future__ import annotations

import json

import httpx

from gateway.messages import (
    Readiness,
)
from tests.unit.gateway_face.scripted import (
    CHAT,
    COMPLETIONS,
    ScriptedPipeline,
    chat,
    check_error,
)


async def test_models(client: httpx.AsyncClient, pipeline: ScriptedPipeline) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == list(pipeline.names)
    for model in listed["data"]:
        assert (await client.get(f"/v1/models/{model['id']}")).json() == model
        assert (await client.post(CHAT, json=chat() | {"model": model["id"]})).status_code == 200
    check_error(await client.get("/v1/models/other"), 404, "model_not_found", "model")
    answer = await client.post(CHAT, json=chat() | {"model": "other"})
    check_error(answer, 404, "model_not_found", "model")


async def test_ready_follows_the_pipeline(
    client: httpx.AsyncClient, pipeline: ScriptedPipeline
) -> None:
    answer = await client.get("/ready")
    assert answer.status_code == 200
    assert answer.json()["endpoints"] == [{"role": "decoder", "address": "d:1"}]
    pipeline.ready = Readiness(True, False)
    answer = await client.get("/ready")
    assert (answer.status_code, answer.json()["images"]) == (200, False)
    pipeline.ready = Readiness(False, False)
    assert (await client.get("/ready")).status_code == 503
    assert (await client.get("/health")).status_code == 200


async def test_metrics_count_outcomes_and_tokens(client: httpx.AsyncClient) -> None:
    await client.post(CHAT, json=chat())
    await client.post(CHAT, content=b"{", headers={"content-type": "application/json"})
    text = (await client.get("/metrics")).text
    for line in (
        'chiasm_requests_total{code="200"} 1.0',
        'chiasm_requests_total{code="400"} 1.0',
        "chiasm_prompt_tokens_total 11.0",
        "chiasm_generation_tokens_total 3.0",
        'chiasm_time_to_first_token_seconds_count{kind="text"} 1.0',
        "chiasm_e2e_request_latency_seconds_count 1.0",
        "chiasm_num_requests_running 0.0",
    ):
        assert line in text


async def test_tokenize_and_back(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/tokenize", json={"prompt": "a<|im_end|>"})).json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 8192
    back = await client.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "a<|im_end|>"}
    special = await client.post("/tokenize", json={"prompt": "a<|im_end|>", "parse_special": True})
    assert special.json()["count"] < answer["count"]
    turns = await client.post("/tokenize", json={"messages": chat()["messages"], "model": "demo"})
    text = (await client.post("/detokenize", json={"tokens": turns.json()["tokens"]})).json()
    assert text["prompt"].endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    check_error(await client.post("/tokenize", json={}), 400, "invalid_request", "prompt")
    answer = await client.post("/detokenize", json={"tokens": [5, 10**9]})
    check_error(answer, 400, "invalid_request", "tokens[1]")


async def test_the_description_is_whole_and_the_page_needs_nothing_from_elsewhere(
    client: httpx.AsyncClient,
) -> None:
    document = (await client.get("/openapi.json")).json()
    names = set(document["components"]["schemas"])
    refs = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert refs <= names
    assert {CHAT, COMPLETIONS, "/v1/models", "/tokenize", "/ready"} <= set(document["paths"])
    chat_fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "top_k", "mm_processor_kwargs", "return_timings"} <= set(chat_fields)
    answers = document["paths"][CHAT]["post"]["responses"]
    assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    assert {"4XX", "5XX"} <= set(answers)
    assert "422" not in json.dumps(document["paths"])
    assert set(document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {
        "text/plain"
    }
    page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "https://" not in page.text
    assert "http://" not in page.text
