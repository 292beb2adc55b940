"""Family -> how it thinks and calls tools; of several ways the template decides."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from gateway.dialects.base import Quote, ToolFormat, TurnReader
from gateway.dialects.glm_calls import GlmFormat
from gateway.dialects.json_calls import HermesFormat, InternLMFormat
from gateway.dialects.thinking import ThinkTags, ThoughtReader
from gateway.messages import Toolbox, ToolChoice

_HERMES: tuple[type[ToolFormat], ...] = (HermesFormat,)
_GLM: tuple[type[ToolFormat], ...] = (GlmFormat, HermesFormat)
_INTERN: tuple[type[ToolFormat], ...] = (InternLMFormat, HermesFormat)
_TOOLS: dict[str, tuple[type[ToolFormat], ...]] = {
    "qwen2_vl": _HERMES,
    "qwen2_5_vl": _HERMES,
    "qwen3_vl": _HERMES,
    "qwen3_vl_moe": _HERMES,
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm46v": _GLM,
    "internvl": _INTERN,
    "internvl_chat": _INTERN,
}
_THINKS = frozenset(
    ("qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe", "glm46v", "internvl", "internvl_chat")
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one checkpoint speaks."""

    tools: ToolFormat | None
    """None = its template takes no tools."""
    thinking: ThinkTags | None
    quote: Quote

    @classmethod
    def of(cls, family: str, template: str, quote: Quote) -> Dialect:
        """The dialect of a family, by what its chat template shows."""
        forms = [form for form in _TOOLS.get(family, ()) if form.marker in template]
        takes_tools = bool(forms) and "tools" in template
        return cls(
            forms[0]() if takes_tools else None,
            ThinkTags() if family in _THINKS else None,
            quote,
        )

    def opens_thought(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside a thought."""
        tags = self.thinking
        return tags is not None and prompt.rstrip().endswith(tags.opening)

    @property
    def tags(self) -> tuple[str, ...]:
        """Names that stay in the text when they are special tokens."""
        thinking = (self.thinking.opening, self.thinking.closing) if self.thinking else ()
        return (*thinking, *(self.tools.tags if self.tools else ()))

    def thoughts(self, *, open: bool) -> ThoughtReader | None:
        """Reads thoughts; None for a family that has none."""
        return ThoughtReader(self.thinking, open=open) if self.thinking else None

    def turn(self, toolbox: Toolbox | None) -> TurnReader | None:
        """Reads calls; None when there is nothing to call."""
        if toolbox is None or self.tools is None or toolbox.choice is ToolChoice.NONE:
            return None
        tools = {tool.name: tool for tool in toolbox.tools}
        return TurnReader(self.tools, tools, new_call_id, single=not toolbox.parallel)


def new_call_id() -> str:
    """An id no other call has."""
    return f"call_{secrets.token_hex(12)}"
