"""Thirty conversations through our template engine and tokenizer, and through transformers'.

The templates are written here: they do what templates of the families do (parts, tools as JSON,
thoughts of earlier turns left out, loops with state), not what any one of them says.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chiasm.plan import Modality
from gateway.messages import MediaPart, Message, Role, TextPart, Tool, ToolCall
from gateway.prompt import PromptBuilder
from gateway.turns import TurnForm
from tests import torchvision_ops
from tests.checkpoints import DEMO

torchvision_ops.declare()
from transformers import AutoTokenizer  # noqa: E402

_PARTS = """
{%- macro show(content, counted) -%}
    {%- if content is string -%}{{ content }}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type == 'image' -%}
                {%- if counted -%}Picture {{ loop.index }}: {% endif -%}
                <|vision_start|><|image_pad|><|vision_end|>
            {%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
            {%- elif 'text' in part -%}{{ part.text }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
"""
TEMPLATES = {
    "tools as JSON in the system turn": _PARTS
    + """
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ show(messages[0].content, false) }}

{% endif %}<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ show(messages[0].content, false) }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
    {%- if message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ show(message.content, false) }}
</tool_response><|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{{ show(message.content, false) }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
""",
    "state in a namespace, pictures counted, trimmed text": _PARTS
    + """
{%- set ns = namespace(turns=0, last_user=0) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- set text = show(message.content, true) -%}
    {%- if loop.index0 < ns.last_user -%}{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {%- set ns.turns = ns.turns + 1 -%}
<|im_start|>{{ message.role | upper }} {{ ns.turns }}
{{ text | trim }}<|im_end|>
{%- generation -%}{{ '\\n' }}{%- endgeneration -%}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}
""",
}
_WORDS = (
    *("What", "is", "left", "of", "the", "red", "square?", "Ünïcödé", "漢字", "🙂", "{{", "braces"),
    *("}}", "<b>&amp;</b>", "12345", "\n\ttabs", "'quotes'"),
)
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Finds <things> & more, é",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
    },
}


class Talk:
    """One conversation, as we and as transformers take it."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.ours: list[Message] = []
        self.theirs: list[dict[str, Any]] = []
        self.tools = seed % 4 < 2
        if seed % 2:
            self._say(Role.SYSTEM, ())
        for turn in range(1 + seed % 3):
            media = self._draw.choices(tuple(Modality), k=self._draw.randint(0, 3))
            self._say(Role.USER, tuple(media))
            if turn < seed % 3:
                if self.tools:
                    self._call()
                self._say(Role.ASSISTANT, (), lead="<think>hm</think>\n" if seed % 5 == 0 else "")

    def _text(self) -> str:
        return " ".join(self._draw.choices(_WORDS, k=self._draw.randint(1, 9)))

    def _say(self, role: Role, media: tuple[Modality, ...], lead: str = "") -> None:
        text = lead + self._text()
        parts = tuple(MediaPart(kind, None, b"", "p") for kind in media)
        self.ours.append(Message(role, (*parts, TextPart(text))))
        shown = [{"type": kind.value} for kind in media]
        content = [*shown, {"type": "text", "text": text}] if media else text
        self.theirs.append({"role": role.value, "content": content})

    def _call(self) -> None:
        arguments = {"what": self._text(), "n": 3}
        call = ToolCall("c1", "look_up", json.dumps(arguments))
        self.ours.append(Message(Role.ASSISTANT, (TextPart(""),), (call,)))
        function = {"name": "look_up", "arguments": arguments}
        calls = [{"type": "function", "id": "c1", "function": function}]
        self.theirs.append({"role": "assistant", "content": "", "tool_calls": calls})
        answer = self._text()
        self.ours.append(Message(Role.TOOL, (TextPart(answer),), tool_call_id="c1"))
        self.theirs.append({"role": "tool", "content": answer, "tool_call_id": "c1"})


@pytest.fixture(scope="module", params=TEMPLATES, name="model_dir")
def model_dir_(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("template")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, path / name)
    (path / "chat_template.jinja").write_text(TEMPLATES[request.param], encoding="utf-8")
    yield path


@pytest.mark.filterwarnings("ignore")
def test_thirty_conversations(model_dir: Path) -> None:
    builder = PromptBuilder(model_dir)
    reference = AutoTokenizer.from_pretrained(model_dir)
    kinds = set()
    for seed in range(30):
        talk = Talk(seed)
        takes_tools = builder.dialect.tools is not None
        function = _TOOL["function"]
        tool = Tool(name=function["name"], body=_TOOL, parameters=function["parameters"])
        tools = (tool,) if talk.tools and takes_tools else ()
        rendered = builder.render(talk.ours, form=TurnForm(tools=tools))
        text = reference.apply_chat_template(
            talk.theirs,
            tools=[_TOOL] if tools else None,
            tokenize=False,
            add_generation_prompt=True,
        )
        expected = reference(text, add_special_tokens=False)["input_ids"]
        assert list(rendered.token_ids) == expected, text
        kinds |= {message.role for message in talk.ours}
        kinds |= {slot.modality for slot in rendered.slots}
    assert kinds >= {*Role, *Modality}
