"""A checkpoint's chat template: found, compiled and run in a sandbox. Knows nothing of tokens.

The template is the checkpoint's and trusted to loop and format; what it renders is the client's and
is only ever data to it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chiasm.errors import InvalidRequest
from chiasm.json_file import read_json
from gateway.specials import unescaped


class ChatTemplate:
    """One compiled template.

    Args:
        source: Jinja text.
        variables: Further names the template may use, such as ``eos_token``.

    Raises:
        ValueError: The template does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        self.source = source
        self._variables = dict(variables)
        self._takes_text = "probe" in self._try({"role": "user", "content": "probe"})

    @classmethod
    def from_dir(cls, model_dir: Path) -> ChatTemplate:
        """Reads chat_template.jinja, chat_template.json or tokenizer_config.json, in this order.

        Raises:
            ValueError: None of them holds a template.
        """
        config = read_json(model_dir / "tokenizer_config.json", optional=True)
        return cls(_find(model_dir, config), _token_names(config))

    @property
    def takes_text(self) -> bool:
        """Whether `content` may be a string; else it must be a list of parts."""
        return self._takes_text

    def shows(self, part: dict[str, str], found: Callable[[str], Any]) -> bool:
        """Whether `found` finds something in what becomes of a message of this one part."""
        return bool(found(self._try({"role": "user", "content": [part]})))

    @property
    def reserved(self) -> frozenset[str]:
        """Names a request must not set."""
        return frozenset(self._variables) | {"messages", "tools", "add_generation_prompt"}

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Any] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text, by default open for the assistant's turn.

        Raises:
            InvalidRequest: The template refuses these messages.
        """
        try:
            return self._template.render(
                **{**(options or {}), **self._variables},
                messages=messages,
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
            )
        except _Refused as refused:
            raise InvalidRequest(f"chat template: {refused}", param="messages") from refused
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, RecursionError) as error:
            raise InvalidRequest(
                "the model's chat template cannot render these messages", param="messages"
            ) from error

    def _try(self, message: dict[str, Any]) -> str:
        """What becomes of one message; nothing where the template refuses it."""
        try:
            return self.render([message])
        except InvalidRequest:
            return ""


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _refuse(message: str) -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: no HTML escapes, unlike jinja's own filter."""
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return unescaped(text) if ensure_ascii else text


def _find(model_dir: Path, config: Mapping[str, Any]) -> str:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    separate = read_json(model_dir / "chat_template.json", optional=True)
    found = separate.get("chat_template") or config.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    if not isinstance(found, str):
        raise ValueError(f"{model_dir} has no chat template")
    return found


def _token_names(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and its kin, as the template's variables."""
    names = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(key)
        content = value.get("content") if isinstance(value, dict) else value
        names[key] = content if isinstance(content, str) else ""
    return names
