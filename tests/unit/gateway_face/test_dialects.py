"""Thoughts and calls in the families' formats: read the same however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chiasm.demo import checkpoint_dir
from chiasm.plan import Span
from decoder_svc.config import read_text_config
from decoder_svc.sampling.grammar import GrammarCompiler, source_of
from gateway.answer_reader import AnswerReader
from gateway.dialects import Dialect
from gateway.dialects.grammar import quoted
from gateway.guides import grammar_of
from gateway.messages import (
    ChatJob,
    Guide,
    GuideKind,
    Message,
    Role,
    Sampling,
    TextPart,
    Tool,
    Toolbox,
    ToolChoice,
)
from gateway.prompt import ExpandedPrompt

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = Tool(name="weather", body={}, parameters=SCHEMA)
STOP = Tool(name="stop", body={}, parameters={"type": "object", "additionalProperties": False})
BOX = Toolbox(tools=(WEATHER, STOP))
HERMES = Dialect.of("qwen2_5_vl", "{{ tools }}<tool_call>", quoted)
QWEN3 = Dialect.of("qwen3_vl", "{{ tools }}<tool_call>", quoted)
GLM = Dialect.of("glm4v_moe", "{{ tools }}<tool_call><arg_key>", quoted)
INTERN = Dialect.of("internvl", "{{ tools }}<|action_start|><|plugin|>", quoted)
ARGUMENTS = '{"city": "São \\"P\\" {x}", "days": 3, "unit": "C"}'
HERMES_CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
GLM_CALL = (
    '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>São "P" {x}</arg_value>\n'
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    "<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n</tool_call>"
)
INTERN_CALL = (
    f'<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {ARGUMENTS}}}<|action_end|>'
)


def read(
    dialect: Dialect | None,
    pieces: list[str],
    box: Toolbox | None = BOX,
    *,
    thinking: bool = False,
) -> tuple[str, str, list[tuple[str, str]]]:
    """Text, thought, and calls as (name, arguments)."""
    reader = AnswerReader(dialect, box, thinking=thinking)
    text, thought = "", ""
    calls: list[list[str]] = []
    for heard in [*map(reader.push, pieces), reader.flush()]:
        text += heard.text
        thought += heard.reasoning
        for call in heard.calls:
            if call.id:
                assert call.index == len(calls)
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    assert reader.has_called == bool(calls)
    return text, thought, [(name, arguments) for name, arguments in calls]


def cuts(text: str) -> list[list[str]]:
    """Whole, character by character, and in two at every place."""
    return [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]


@pytest.mark.parametrize(
    ("dialect", "call"),
    [(HERMES, HERMES_CALL), (QWEN3, HERMES_CALL), (GLM, GLM_CALL), (INTERN, INTERN_CALL)],
    ids=["hermes", "qwen3", "glm", "internlm"],
)
def test_calls_are_read_however_they_are_cut(dialect: Dialect, call: str) -> None:
    for pieces in cuts(f"Let me see. {call}"):
        text, thought, ((name, arguments),) = read(dialect, pieces)
        assert (text, thought, name) == ("Let me see. ", "", "weather")
        assert json.loads(arguments) == json.loads(ARGUMENTS)
    text, _, found = read(dialect, list(f"{call}\n{call}"))
    assert text == "" and len(found) == 2


@pytest.mark.parametrize(("dialect", "call"), [(HERMES, HERMES_CALL), (GLM, GLM_CALL)])
def test_one_call_is_all_when_calls_are_not_parallel(dialect: Dialect, call: str) -> None:
    single = Toolbox(tools=BOX.tools, parallel=False)
    for pieces in ([f"{call}\n{call} more"], list(f"{call}\n{call} more")):
        text, _, found = read(dialect, pieces, single)
        assert (text, len(found)) == ("", 1)
    reader = AnswerReader(dialect, single)
    reader.push(call)
    assert reader.over


def test_arguments_come_before_the_call_is_whole() -> None:
    for dialect, begun in (
        (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'),
        (GLM, "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ro"),
    ):
        heard = AnswerReader(dialect, BOX).push(begun)
        assert "".join(call.arguments for call in heard.calls) == '{"city": "Ro'


@pytest.mark.parametrize(
    "text",
    [
        "a < b and <tool",
        "<tool_call>\nnot json\n</tool_call> after",
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        "<tool_call>",
        "<tool_call>\n</tool_call>",
        '<tool_call>\n{"name": 5}\n</tool_call>',
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    for pieces in cuts(text):
        assert read(HERMES, pieces) == (text, "", [])


def test_odd_calls() -> None:
    assert read(HERMES, ['<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'])[2] == [
        ("f", '{"a": 1}')
    ], "arguments first"
    assert read(HERMES, ['<tool_call>{"name": "stop"}</tool_call>'])[2] == [("stop", "{}")]
    assert read(HERMES, ['<tool_call>{"name": "f", "arguments": {"a": "</tool'])[2] == [
        ("f", '{"a": "</tool')
    ], "cut by the token limit"
    assert read(GLM, ["<tool_call>stop\n</tool_call>"])[2] == [("stop", "{}")]
    assert read(GLM, ["<tool_call>stop</tool_call>"])[2] == [("stop", "{}")]
    assert read(GLM, ["<tool_call>nothing of the kind</tool_call>"])[2] == []
    loose = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>two words</arg_value>\n</tool_call>"
    assert read(GLM, list(loose))[2] == [("f", '{"a": "two words"}')]


@pytest.mark.parametrize("dialect", [QWEN3, GLM])
def test_thoughts_are_told_apart_however_they_are_cut(dialect: Dialect) -> None:
    said = "<think>\nHm, a < b.\nSo\n\nit is.\n</think>\n\nIt is 5."
    for pieces in cuts(said):
        assert read(dialect, pieces, None) == ("It is 5.", "Hm, a < b.\nSo\n\nit is.", [])
    for pieces in cuts(said.removeprefix("<think>\n")):
        found = read(dialect, pieces, None, thinking=True)
        assert found == ("It is 5.", "Hm, a < b.\nSo\n\nit is.", [])


def test_answers_without_thoughts_and_cut_thoughts() -> None:
    for pieces in cuts("It <thinks> so."):
        assert read(QWEN3, pieces, None) == ("It <thinks> so.", "", [])
    for pieces in cuts("<think>never ends </thi"):
        assert read(QWEN3, pieces, None) == ("", "never ends </thi", [])
    assert read(QWEN3, ["<think>\n\n</think>\n\nyes"], None) == ("yes", "", [])
    assert read(HERMES, ["<think>x</think>y"], None) == ("<think>x</think>y", "", [])


def test_thought_then_call() -> None:
    for pieces in cuts(f"<think>I must.</think>\n{HERMES_CALL}"):
        text, thought, found = read(QWEN3, pieces)
        assert (text, thought, len(found)) == ("", "I must.", 1)


def test_the_template_decides_what_is_spoken() -> None:
    assert Dialect.of("qwen2_5_vl", "no such thing", quoted).tools is None
    assert Dialect.of("glm4v", "{{ tools }}<tool_call>", quoted).tools.__class__ is (
        HERMES.tools.__class__
    )
    assert Dialect.of("unknown", "{{ tools }}<tool_call>", quoted).tools is None
    assert QWEN3.opens_thought("...<|im_start|>assistant\n<think>\n")
    assert not QWEN3.opens_thought("...<think>\n\n</think>\n\n")


# --- grammars -----------------------------------------------------------------------------------

COMPILER = GrammarCompiler.of(checkpoint_dir(), read_text_config(checkpoint_dir()))
WIDE = GrammarCompiler(checkpoint_dir(), vocab_size=400, eos_token_ids=COMPILER.eos_token_ids)


def job(box: Toolbox | None = None, guide: Guide | None = None) -> ChatJob:
    return ChatJob(
        request_id="r",
        model="m",
        sampling=Sampling(),
        messages=(Message(Role.USER, (TextPart("x"),)),),
        toolbox=box,
        guide=guide,
    )


def accepts(dialect: Dialect, text: str, *, thinking: bool = False, **wanted: Any) -> bool:
    """Whether the grammar takes the text as a whole answer."""
    prompt = ExpandedPrompt((1,), (tuple[Span, ...]()), thinking)
    grammar = grammar_of(job(**wanted), dialect, prompt)
    assert grammar is not None
    kind = grammar.WhichOneof("kind")
    matcher = WIDE.compile(source_of(kind, getattr(grammar, kind)))
    ids = WIDE.load().tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


FORCED = Toolbox(tools=BOX.tools, choice=ToolChoice.REQUIRED)
NAMED = Toolbox(tools=BOX.tools, named="stop")


@pytest.mark.parametrize(
    ("dialect", "call", "stop"),
    [
        (HERMES, HERMES_CALL, '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'),
        (GLM, GLM_CALL, "<tool_call>stop\n</tool_call>"),
    ],
    ids=["hermes", "glm"],
)
def test_forced_calls_are_written_in_the_family_s_format(
    dialect: Dialect, call: str, stop: str
) -> None:
    assert accepts(dialect, call, box=FORCED)
    assert accepts(dialect, stop, box=FORCED) and accepts(dialect, stop, box=NAMED)
    assert accepts(dialect, f"{call}\n{stop}", box=FORCED)
    single = Toolbox(tools=BOX.tools, choice=ToolChoice.REQUIRED, parallel=False)
    assert not accepts(dialect, f"{call}\n{stop}", box=single)
    assert not accepts(dialect, call, box=NAMED)
    assert not accepts(dialect, "plain text", box=FORCED)
    assert not accepts(dialect, call.replace("days", "daze"), box=FORCED)
    assert not accepts(dialect, call.replace("3", "three"), box=FORCED)


def test_thoughts_come_before_what_is_guided() -> None:
    guide = Guide(GuideKind.JSON_SCHEMA, {"type": "integer"}, "response_format")
    assert accepts(QWEN3, "5", guide=guide)
    assert accepts(QWEN3, "<think>\nhm\n</think>\n\n5", guide=guide)
    assert accepts(QWEN3, "hm\n</think>\n\n5", guide=guide, thinking=True)
    assert not accepts(QWEN3, "5", guide=guide, thinking=True)
    assert not accepts(QWEN3, "hm", guide=guide)
    thoughtful = f"<think>x</think>\n{HERMES_CALL}"
    assert accepts(QWEN3, thoughtful, box=FORCED)


def test_a_form_or_a_call() -> None:
    """With tools that may be called, an answer of a given form may also be a call."""
    strict = Tool(name="weather", body={}, parameters=SCHEMA, strict=True)
    box = Toolbox(tools=(strict,))
    guide = Guide(GuideKind.CHOICE, ("yes", "no"), "structured_outputs.choice")
    assert accepts(HERMES, "yes", box=box, guide=guide)
    assert accepts(HERMES, HERMES_CALL, box=box, guide=guide)
    assert accepts(HERMES, HERMES_CALL, box=BOX, guide=guide)
    assert not accepts(HERMES, "maybe", box=box, guide=guide)
    assert accepts(HERMES, "Let me see. " + HERMES_CALL, box=box)
    assert accepts(HERMES, "No need.", box=box)
    assert not accepts(HERMES, HERMES_CALL.replace("days", "daze"), box=box)


def test_free_answers_have_no_grammar() -> None:
    prompt = ExpandedPrompt((1,))
    assert grammar_of(job(), HERMES, prompt) is None
    assert grammar_of(job(box=BOX), HERMES, prompt) is None
