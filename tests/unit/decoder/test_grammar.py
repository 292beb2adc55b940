"""Grammars: answers obey them however they were computed, and none of them harms anybody."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from chiasm.demo import checkpoint_dir
from chiasm.errors import InvalidRequest, ResourceExhausted
from chiasm.v1 import decoder_pb2
from decoder_svc import grammar_check
from decoder_svc.config import read_text_config
from decoder_svc.engine.messages import FinishReason, Tokens
from decoder_svc.grammar_check import NUM_TRIERS, GrammarCheck
from decoder_svc.sampling.grammar import MOST_SOURCE_BYTES, GrammarCompiler, source_of
from decoder_svc.sampling.grammar_masks import GrammarMasks
from decoder_svc.sampling.params import NO_TOKEN, Draw, SamplingParams
from decoder_svc.sampling.sampler import Sampler
from tests.unit.decoder.rig import Outcome, Rig, make_request

torch.set_num_threads(1)

MODEL = checkpoint_dir()
TEXT = read_text_config(MODEL)
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
PROMPT = [40, 41, 42, 60, 61]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "shape": {"enum": ["circle", "square"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["shape", "count", "tags"],
    "additionalProperties": False,
}
JSON = source_of("json_schema", json.dumps(SCHEMA))


def text_of(outcome: Outcome) -> str:
    return str(TOKENIZER.decode(outcome.tokens()))


def compiler() -> GrammarCompiler:
    return GrammarCompiler.of(MODEL, TEXT)


def draw(source: str, output: tuple[int, ...] = (), **changes: Any) -> Draw:
    params = SamplingParams(max_tokens=100, grammar=source, **changes)
    return Draw(params, 0, len(output), (), output)


def allowed(masks: GrammarMasks, one: Draw) -> set[int]:
    (bits,) = masks.fill([one])
    return {i for i in range(TEXT.vocab_size) if bits[i >> 5] >> (i & 31) & 1}


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("seed", range(6))
def test_every_finished_answer_validates(seed: int) -> None:
    rig = Rig(MODEL)
    sampling = {"max_tokens": 600, "temperature": 1.0, "seed": seed, "grammar": JSON}
    stops = TEXT.eos_token_ids
    outcome = rig.generate(prompt=PROMPT, stop_token_ids=stops, **sampling)
    assert outcome.finished[0].reason is FinishReason.STOP
    jsonschema.validate(json.loads(text_of(outcome)), SCHEMA)


def test_preempted_and_resumed_answers_are_the_same() -> None:
    """State is found by the output alone: lost pages and another decoder change nothing."""
    common = {"max_tokens": 60, "temperature": 1.0, "grammar": JSON}
    common["stop_token_ids"] = TEXT.eos_token_ids
    calm = []
    for seed in range(4):
        rig = Rig(MODEL, prefix=False)
        calm.append(rig.generate(prompt=PROMPT, seed=seed, **common).tokens())
    cramped = Rig(MODEL, prefix=False, num_blocks=20, block_size=4)
    for seed in range(4):
        request = make_request(TEXT, f"r{seed}", prompt=PROMPT, seed=seed, **common)
        cramped.put(request)
    outcomes = [cramped.run(f"r{seed}").tokens() for seed in range(4)]
    assert outcomes == calm
    assert cramped.metrics.preemptions._value.get() > 0
    begun = tuple(calm[2][:7])
    ahead = Rig(MODEL, prefix=False, ahead=True)
    assert ahead.generate(prompt=PROMPT, seed=1, **common).tokens() == calm[1]
    resumed = Rig(MODEL).generate(prompt=PROMPT, seed=2, resume=(begun,), **common)
    rest = [token for event in resumed.of(Tokens) for token in event.token_ids]
    assert [*begun, *rest] == calm[2]


def test_requests_of_one_grammar_and_seed_do_not_mix() -> None:
    """The same seed with other prompts: each has a state of its own, read on and not made anew."""
    rig = Rig(MODEL)
    sampling = {"max_tokens": 80, "temperature": 1.0, "seed": 7, "grammar": JSON}
    sampling["stop_token_ids"] = TEXT.eos_token_ids
    for index in range(3):
        prompt = [*PROMPT, 50 + index]
        rig.put(make_request(TEXT, f"r{index}", prompt=prompt, **sampling))
    together = [rig.run(f"r{index}").tokens() for index in range(3)]
    assert rig.sampler.masks.num_states <= 3
    for index in range(3):
        alone = Rig(MODEL).generate(prompt=[*PROMPT, 50 + index], **sampling)
        assert alone.tokens() == together[index]


def test_choices_of_one_request_have_grammars_of_their_own() -> None:
    rig = Rig(MODEL)
    request = make_request(
        TEXT,
        "r",
        prompt=PROMPT,
        n=3,
        max_tokens=600,
        temperature=1.0,
        seed=3,
        grammar=JSON,
        stop_token_ids=TEXT.eos_token_ids,
    )
    rig.put(request)
    outcome = rig.run("r")
    for choice in range(3):
        jsonschema.validate(json.loads(TOKENIZER.decode(outcome.tokens(choice))), SCHEMA)


def test_the_end_is_allowed_where_the_grammar_may_end() -> None:
    masks = GrammarMasks(compiler())
    source = source_of("regex", "ab+")
    (a,), (b,) = ids("a"), ids("b")
    eos = set(TEXT.eos_token_ids)
    assert allowed(masks, draw(source)) == {a}
    assert allowed(masks, draw(source, (a,))) == {b}
    assert allowed(masks, draw(source, (a, b))) == {b} | eos
    held = {"min_tokens": 3, "stop_token_ids": TEXT.eos_token_ids}
    assert allowed(masks, draw(source, (a, b), **held)) == {b}
    only = source_of("regex", "a")
    assert allowed(masks, draw(only, (a,), **held)) == eos, "it has nowhere else to go"


def test_a_grammar_that_forces_a_special_name_spells_it() -> None:
    masks = GrammarMasks(compiler())
    source = source_of("json_schema", json.dumps({"const": "<tool_call><|im_start|>"}))
    text, output = '"<tool_call><|im_start|>"', ()
    while len(TOKENIZER.decode(output, skip_special_tokens=False)) < len(text):
        (token, *_) = sorted(allowed(masks, draw(source, output)))
        assert token not in range(384, 400), "special tokens are not text"
        output = (*output, token)
    assert TOKENIZER.decode(output) == text
    named = source_of("lark", "start: <[398]> /a+/ <[399]>")
    assert allowed(masks, draw(named)) == {398}


def test_tokens_only_prompts_may_hold_stay_out_and_a_dead_end_is_said() -> None:
    masked = TEXT.masked_token_ids
    masks = GrammarMasks(compiler(), masked)
    dead = draw(source_of("lark", f"start: <[{masked[0]}]>"))
    fine = draw(source_of("regex", "a"))
    sampler = Sampler(masked, device=torch.device("cpu"), grammars=masks)
    drawn = sampler.sample(torch.zeros(3, TEXT.vocab_size), [dead, fine, draw("")])
    found = drawn.results()
    assert [found[0].token_id, found[1].token_id] == [NO_TOKEN, ids("a")[0]]
    assert found[2].token_id >= 0


def test_a_dead_end_fails_its_request_alone() -> None:
    rig = Rig(MODEL)
    source = source_of("lark", f"start: /a/ <[{TEXT.masked_token_ids[0]}]>")
    rig.put(make_request(TEXT, "dead", prompt=PROMPT, grammar=source))
    rig.put(make_request(TEXT, "fine", prompt=PROMPT))
    rig.run("dead", "fine")
    assert len(rig.outcomes["fine"].tokens()) == 8
    assert isinstance(rig.outcomes["dead"].failure, InvalidRequest)


def test_states_nobody_asks_for_go() -> None:
    masks = GrammarMasks(compiler())
    masks.fill([draw(JSON)])
    assert masks.num_states == 1
    for _ in range(200):
        masks.fill([])
    assert masks.num_states == 0


# --- checking -----------------------------------------------------------------------------------

CHAIN = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(5000)) + '\nr5000: "x"'
ENDLESS = {"allOf": [{"type": "string", "pattern": f"a{{{i},1000}}b"} for i in range(200)]}
WIDE = {"type": "object", "properties": {f"p{i}": {} for i in range(9000)}}
BAD_SCHEMAS: dict[str, Any] = {
    "a property that is a string": {"type": "object", "properties": {"a": "string"}},
    "a regex that is none": {"type": "string", "pattern": "(((("},
    "look-around": {"type": "string", "pattern": "^(?=.*a)x$"},
    "a reference to nothing": {"$ref": "#/$defs/none"},
    "a reference to elsewhere": {"$ref": "http://localhost:1/schema.json"},
    "an unknown keyword": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "a type that is none": {"type": "text"},
    "nothing": False,
    "contradiction": {"type": "string", "enum": [1, 2]},
    "endless": ENDLESS,
    "wide": WIDE,
}


@pytest.fixture(name="check")
async def check_(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GrammarCheck]:
    """On a machine that is too busy to start a process in ten seconds, too."""
    monkeypatch.setattr(grammar_check, "_TRIAL_S", 100.0)
    check = GrammarCheck(compiler())
    yield check
    await check.close()


def schema_of(schema: Any) -> decoder_pb2.Grammar:
    return decoder_pb2.Grammar(json_schema=json.dumps(schema), param="response_format")


async def test_good_grammars_pass(check: GrammarCheck) -> None:
    check.start()
    assert await check.check(decoder_pb2.Grammar()) == ""
    assert await check.check(schema_of(SCHEMA)) == JSON
    many = schema_of({"enum": [f"value {i}" for i in range(10_000)]})
    assert await check.check(many)
    tuples = schema_of({"type": "array", "items": [{"type": "string"}, {"type": "integer"}]})
    assert await check.check(tuples)
    assert await check.check(schema_of(True))
    recursive = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, {}]}}}
    assert await check.check(schema_of(recursive))


@pytest.mark.parametrize("name", BAD_SCHEMAS)
async def test_bad_schemas_are_refused_and_the_next_one_passes(
    check: GrammarCheck, name: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await check.check(schema_of(BAD_SCHEMAS[name]))
    assert refused.value.param == "response_format"
    assert await check.check(schema_of(SCHEMA)) == JSON


@pytest.mark.parametrize(
    "grammar",
    [
        decoder_pb2.Grammar(lark=CHAIN),  # takes the library through the end of its stack
        decoder_pb2.Grammar(lark="start: nothing"),
        decoder_pb2.Grammar(lark="start: <[100000]>"),
        decoder_pb2.Grammar(regex="a{1,"),
        decoder_pb2.Grammar(json_schema="{"),
        decoder_pb2.Grammar(json_schema='{"a":' * 20_000),
        decoder_pb2.Grammar(regex="a" * (MOST_SOURCE_BYTES + 1)),
    ],
    ids=["crash", "undefined", "no token", "regex", "json", "deep", "long"],
)
async def test_what_would_end_a_process_is_refused(
    check: GrammarCheck, grammar: decoder_pb2.Grammar
) -> None:
    with pytest.raises(InvalidRequest):
        await check.check(grammar)
    assert await check.check(schema_of(SCHEMA)) == JSON


async def test_many_at_once_are_tried_or_refused_and_the_loop_turns(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that cannot be tried in time are told to come again; the event loop is never held.

    By its thread's own time: that the machine leaves it none says nothing of it.
    """
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.01)
            longest = max(longest, time.thread_time() - before)

    beating = asyncio.create_task(beat())
    evil = [schema_of({**ENDLESS, "description": str(i)}) for i in range(NUM_TRIERS * 8)]
    tried = [asyncio.create_task(check.check(grammar)) for grammar in evil]
    for _ in range(3):  # not turns enough to start a process
        await asyncio.sleep(0)
    assert not any(task.done() for task in tried)
    outcomes = await asyncio.gather(*tried, return_exceptions=True)
    beating.cancel()
    kinds = {type(outcome) for outcome in outcomes}
    assert kinds <= {InvalidRequest, ResourceExhausted}
    assert InvalidRequest in kinds
    assert longest < 1.0
    monkeypatch.setattr(grammar_check, "_QUEUE_S", 100.0)  # triers are being replaced
    assert await check.check(schema_of(SCHEMA)) == JSON


async def test_without_a_tokenizer_grammars_are_refused(tmp_path: Any) -> None:
    bare = GrammarCompiler(tmp_path, vocab_size=400, eos_token_ids=(1,))
    check = GrammarCheck(bare)
    with pytest.raises(InvalidRequest):
        await check.check(schema_of(SCHEMA))
    await check.close()
