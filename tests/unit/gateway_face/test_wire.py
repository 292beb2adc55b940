"""Thoughts, calls and running usage in chunks and whole answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from chiasm.demo import checkpoint_dir
from chiasm.v1 import decoder_pb2
from gateway.answer_reader import AnswerReader
from gateway.api.wire import ChatWire, Choice, Reply
from gateway.choices import Choices
from gateway.detokenizer import Detokenizer, Manner
from gateway.dialects import Dialect
from gateway.dialects.grammar import quoted
from gateway.messages import ChoiceDone, Delta, FinishReason, JobDone, Timings, Tool, Toolbox, Usage
from gateway.prompt import PromptBuilder

PROMPTS = PromptBuilder(checkpoint_dir())
TOKENIZER = Tokenizer.from_file(str(checkpoint_dir() / "tokenizer.json"))
THINKER = Dialect.of("qwen3_vl", "{{ tools }}<tool_call>", quoted)
BOX = Toolbox(tools=(Tool(name="f", body={}, parameters={}),))
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'
SAID = f"<think>\nhm\n</think>\n\nSo: {CALL}"
DONE = JobDone(Usage(7, 30), Timings())


def reply(**changes: Any) -> Reply:
    vocabulary = PROMPTS.vocabulary
    return Reply(id="x", model="m", bytes_of=vocabulary.bytes_of, usage=False, **changes)


def events(said: str, *, aloud: bool = True, stop: tuple[str, ...] = ()) -> list[Any]:
    """What becomes of an answer, token by token."""
    choices = Choices(
        1,
        lambda: Detokenizer(PROMPTS.vocabulary, Manner(stop=stop)),
        lambda: AnswerReader(THINKER, BOX, aloud=aloud),
        prompt_tokens=7,
    )
    out: list[Any] = []
    for token in TOKENIZER.encode(said, add_special_tokens=False).ids:
        out += choices.push(decoder_pb2.TokenDelta(choice=0, token_ids=[token]))
    stopped = decoder_pb2.ChoiceFinished(choice=0, reason=decoder_pb2.FINISH_REASON_STOP)
    return out + choices.finish(stopped)


def read(frame: bytes) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(frame.removeprefix(b"data: "))
    return parsed


def test_a_stop_token_drawn_behind_a_stop_string_is_not_paid_for() -> None:
    """Whether the decoder draws it before it is told of the stop string is chance."""
    manner = Manner(stop=("So",))
    choices = Choices(1, lambda: Detokenizer(PROMPTS.vocabulary, manner))
    ids = TOKENIZER.encode("So", add_special_tokens=False).ids
    assert isinstance(choices.push(decoder_pb2.TokenDelta(choice=0, token_ids=ids))[-1], ChoiceDone)
    stopped = decoder_pb2.ChoiceFinished(choice=0, reason=decoder_pb2.FINISH_REASON_STOP)
    assert choices.finish(stopped) == [] and choices.overrun == 0
    stopped.stop_token_id = 0
    assert choices.finish(stopped) == [] and choices.overrun == 1


def test_whole_and_streamed_say_the_same() -> None:
    wire, choice = ChatWire(reply()), Choice()
    content = reasoning = arguments = ""
    heads: list[dict[str, Any]] = []
    for event in events(SAID):
        if isinstance(event, ChoiceDone):
            choice.reason = event.reason
            continue
        choice.take(event)
        frame = wire.chunk(event)
        delta = read(frame)["choices"][0]["delta"] if frame else {}
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            assert call["index"] == 0
            heads += [call] if "id" in call else []
            arguments += call["function"]["arguments"]
    assert (content, reasoning, arguments) == ("So: ", "hm", '{"a": [1]}')
    assert [head["function"]["name"] for head in heads] == ["f"]
    message = json.loads(wire.whole([choice], DONE))["choices"][0]
    assert message["finish_reason"] == "tool_calls"
    assert message["message"]["content"] == content
    assert message["message"]["reasoning_content"] == reasoning
    (call,) = message["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": arguments}
    assert call["id"] == heads[0]["id"]


def test_thoughts_can_be_left_out() -> None:
    told = [event for event in events(SAID, aloud=False) if isinstance(event, Delta)]
    assert "".join(event.reasoning for event in told) == ""
    assert "".join(event.text for event in told) == "So: "


def test_a_stop_string_in_the_answer() -> None:
    for include, expected in ((False, "one t"), (True, "one two")):
        detokenizer = Detokenizer(
            PROMPTS.vocabulary, Manner(stop=("wo", "two three"), include_stop=include)
        )
        ids = TOKENIZER.encode("one two", add_special_tokens=False).ids
        text = "".join(detokenizer.push([token]).text for token in ids) + detokenizer.flush()
        assert text == expected and detokenizer.stopped


def test_special_tokens_stay_when_asked_for() -> None:
    (marker,) = TOKENIZER.encode("<|im_start|>", add_special_tokens=False).ids
    kept = PROMPTS.kept_ids(special=True, tags=True)
    assert Detokenizer(PROMPTS.vocabulary, Manner(kept=kept)).push([marker]).text == "<|im_start|>"
    assert Detokenizer(PROMPTS.vocabulary).push([marker]).text == ""


@pytest.mark.parametrize("running", [True, False])
def test_usage_with_every_chunk(running: bool) -> None:
    wire = ChatWire(reply(running=running))
    counts = []
    for event in events("one two"):
        if isinstance(event, Delta):
            wire.count(event)
            if frame := wire.chunk(event):
                counts.append(read(frame).get("usage"))
    last = read(wire.finish(0, FinishReason.STOP)).get("usage")
    if not running:
        assert set(counts) == {None} and last is None
        return
    told = [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in counts]
    assert told == [(7, index + 1) for index in range(len(told))]
    assert last["completion_tokens"] == len(told)
