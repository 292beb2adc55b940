"""What a request wants its answer to look like, as the decoder's grammar.

Thoughts come first and are free; calls that must be made are written in the family's own format.
"""

from __future__ import annotations

import json

from chiasm.v1 import decoder_pb2
from gateway.dialects import Dialect
from gateway.dialects.grammar import embedded, pattern, quoted
from gateway.messages import ChatJob, Guide, GuideKind, Job, Tool, Toolbox, ToolChoice
from gateway.prompt import ExpandedPrompt


def grammar_of(job: Job, dialect: Dialect, prompt: ExpandedPrompt) -> decoder_pb2.Grammar | None:
    """The grammar of a job; None when its answer is free."""
    guide = job.guide
    toolbox = job.toolbox if isinstance(job, ChatJob) else None
    calls = _calls(toolbox, dialect, free=guide is None) if toolbox is not None else None
    thought = _thought(job, dialect, prompt)
    if guide is None and calls is None:
        return None
    if guide is not None and (guide.kind is GuideKind.LARK or (calls is None and not thought)):
        return _plain(guide)
    alternatives, rules, params = [], [], []
    if guide is not None:
        alternatives.append("guided")
        rules.append(f"guided: {_expression(guide)}")
        params.append(guide.param)
    if calls is not None:
        alternatives.append("calls")
        rules += calls
        params.append("tools")
    start = f"start: {thought} ({' | '.join(alternatives)})"
    return decoder_pb2.Grammar(lark="\n".join((start, *rules)), param=params[0])


def _plain(guide: Guide) -> decoder_pb2.Grammar:
    match guide.kind:
        case GuideKind.JSON_SCHEMA:
            text = json.dumps(guide.value, ensure_ascii=False)
            return decoder_pb2.Grammar(json_schema=text, param=guide.param)
        case GuideKind.REGEX:
            return decoder_pb2.Grammar(regex=guide.value, param=guide.param)
        case GuideKind.LARK:
            return decoder_pb2.Grammar(lark=guide.value, param=guide.param)
        case GuideKind.CHOICE:
            lark = f"start: {_expression(guide)}"
            return decoder_pb2.Grammar(lark=lark, param=guide.param)


def _expression(guide: Guide) -> str:
    if guide.kind is GuideKind.JSON_SCHEMA:
        return embedded(guide.value)
    if guide.kind is GuideKind.REGEX:
        return pattern(guide.value)
    return " | ".join(quoted(choice) for choice in guide.value)


def _thought(job: Job, dialect: Dialect, prompt: ExpandedPrompt) -> str:
    """What comes before the answer proper; empty where nothing does."""
    tags = dialect.thinking
    if tags is None or not isinstance(job, ChatJob):
        return ""
    closing = dialect.quote(tags.closing)
    # A tag that is a token ends free text by itself; one that is spelled must not be in it.
    free = "/(?s:.*)/" if closing.startswith("<[") else "/[^<]*/"
    if prompt.opens_thought:
        return rf"{free} {closing} /\n*/"
    return rf"({dialect.quote(tags.opening)} {free} {closing} /\n*/)?"


def _calls(toolbox: Toolbox, dialect: Dialect, *, free: bool) -> list[str] | None:
    """Rules of the calls an answer must or may hold; None where calls need none.

    Args:
        toolbox: What may be called.
        dialect: How.
        free: Whether the answer may be any text as well.
    """
    matters = toolbox.is_forced or not free or any(tool.strict for tool in toolbox.tools)
    if dialect.tools is None or toolbox.choice is ToolChoice.NONE or not matters:
        return None
    names, rules = [], []
    for index, tool in enumerate(toolbox.callable):
        loose = not (toolbox.is_forced or tool.strict)
        rule = dialect.tools.rule(_loosened(tool) if loose else tool, f"tool{index}", dialect.quote)
        names.append(f"tool{index}")
        rules += [f"tool{index}: {rule.expression}", *rule.rules]
    more = ' ("\\n" call)*' if toolbox.parallel else ""
    rules.append(f"call: {' | '.join(names)}")
    opening = dialect.quote(dialect.tools.opening)
    if toolbox.is_forced or not free:
        return [f"calls: call{more}", *rules]
    text = "/(?s:.*)/" if opening.startswith("<[") else "/[^<]*/"
    return [f"calls: {text} (call{more})?", *rules]


def _loosened(tool: Tool) -> Tool:
    return Tool(name=tool.name, body=tool.body, parameters={})
