"""From messages to token ids: the chat template, the tokenizer, one placeholder run per medium.

Owns the rule that user text never yields special tokens and that a medium's rows go where the
template put its slot. Knows nothing of sizes: how many rows an item has is the plan's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from chiasm.checkpoint import read_json
from chiasm.errors import InvalidRequest
from chiasm.plan import Modality
from gateway.chat_template import ChatTemplate
from gateway.messages import MediaPart, Message, Role, TextPart, ToolCall
from gateway.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Slot:
    """Where the template put one medium: the position of its single placeholder token."""

    position: int
    modality: Modality


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Token ids with one placeholder token per medium, and where these are, in item order."""

    token_ids: tuple[int, ...]
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """Token ids as the decoder takes them, and the first placeholder position of every item."""

    token_ids: tuple[int, ...]
    offsets: tuple[int, ...]


class PromptBuilder:
    """Builds prompts for one checkpoint.

    Args:
        model_dir: Directory with config.json, tokenizer.json and a chat template.

    Raises:
        ValueError: One of them is missing or unreadable.
    """

    def __init__(self, model_dir: Path) -> None:
        config = read_json(model_dir / "config.json")
        self.vocabulary = Vocabulary(model_dir)
        self._template = ChatTemplate.from_dir(model_dir)
        self._kinds = _placeholders(config)
        text = config.get("text_config") or {}
        self.vocab_size = int(
            text.get("vocab_size") or config.get("vocab_size") or self.vocabulary.size
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        options: Mapping[str, Any] | None = None,
        limit: int = 0,
    ) -> RenderedPrompt:
        """Applies the chat template and tokenizes.

        Args:
            messages: The conversation.
            options: Further variables of the template.
            limit: Most tokens the caller can use; text that must have more is not tokenized.
                0 = any.

        Raises:
            InvalidRequest: The template refuses the messages, or has no slot for one of the media.
        """
        guard = self.vocabulary.specials.guard_value
        for name in options or ():
            if name in self._template.reserved:
                raise InvalidRequest(f"{name} may not be set", param=f"chat_template_kwargs.{name}")
        text = self._template.render(
            [self._turn(message) for message in messages],
            options=guard(options or {}),
        )
        self._check_length(text, limit, "messages")
        ids = self.vocabulary.encode_sealed(self.vocabulary.specials.seal(text))
        slots = self._slots(ids)
        media = [p for message in messages for p in message.parts if isinstance(p, MediaPart)]
        if [slot.modality for slot in slots] != [part.modality for part in media]:
            raise _no_slot(messages)
        return RenderedPrompt(tuple(ids), slots)

    def expand(self, rendered: RenderedPrompt, rows_per_item: Sequence[int]) -> ExpandedPrompt:
        """Replaces every placeholder token by a run of as many as the item has rows.

        Args:
            rendered: What `render` returned.
            rows_per_item: Rows of every item, in prompt order, all at least 1.
        """
        assert len(rows_per_item) == len(rendered.slots), "one count per slot"
        ids: list[int] = []
        offsets: list[int] = []
        done = 0
        for slot, rows in zip(rendered.slots, rows_per_item, strict=True):
            assert rows >= 1, "an item has rows"
            ids.extend(rendered.token_ids[done : slot.position])
            offsets.append(len(ids))
            ids.extend([rendered.token_ids[slot.position]] * rows)
            done = slot.position + 1
        ids.extend(rendered.token_ids[done:])
        return ExpandedPrompt(tuple(ids), tuple(offsets))

    def encode_text(
        self, text: str, *, parse_special: bool = False, limit: int = 0
    ) -> tuple[int, ...]:
        """Ids of a plain prompt; names of special tokens in it count only if asked for.

        Raises:
            InvalidRequest: It must have more than `limit` tokens (0 = any number will do).
        """
        self._check_length(text, limit, "prompt")
        if parse_special:
            return tuple(self.vocabulary.encode_with_specials(text))
        return tuple(self.vocabulary.encode(text))

    def check_ids(self, token_ids: Sequence[int], *, param: str) -> None:
        """Refuses ids a plain prompt may not hold.

        Raises:
            InvalidRequest: An id is outside the vocabulary or stands for a medium.
        """
        for token_id in set(token_ids):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"token id {token_id} is not in [0, {self.vocab_size})", param=param
                )
            if token_id in self._kinds:
                raise InvalidRequest(
                    f"token id {token_id} stands for a picture or clip; use chat completions",
                    param=param,
                )

    def _check_length(self, text: str, limit: int, param: str) -> None:
        """Saves tokenizing what cannot fit. Normalizing shortens text 4:1 at most."""
        if limit and len(text) > 4 * self.vocabulary.longest * limit:
            raise InvalidRequest(f"the prompt has more than {limit} tokens", param=param)

    def _slots(self, ids: Sequence[int]) -> tuple[Slot, ...]:
        kinds = self._kinds
        return tuple(Slot(at, kinds[i]) for at, i in enumerate(ids) if i in kinds)

    def _turn(self, message: Message) -> dict[str, Any]:
        """One message as chat templates expect it, every user string guarded."""
        guard = self.vocabulary.specials.guard
        turn: dict[str, Any] = {"role": message.role.value, "content": self._content(message)}
        if message.tool_calls:
            turn["tool_calls"] = [self._call(call) for call in message.tool_calls]
        if message.name is not None:
            turn["name"] = guard(message.name)
        if message.tool_call_id is not None:
            turn["tool_call_id"] = guard(message.tool_call_id)
        return turn

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        guard = self.vocabulary.specials.guard
        texts = [part.text for part in message.parts if isinstance(part, TextPart)]
        if len(texts) == len(message.parts) and self._template.takes_text:
            return guard("".join(texts))
        return [
            {"type": "text", "text": guard(part.text)}
            if isinstance(part, TextPart)
            else {"type": part.modality.value}
            for part in message.parts
        ]

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments: Any = call.arguments
        try:
            parsed = orjson.loads(call.arguments)
        except orjson.JSONDecodeError:
            pass  # what a model once wrote may not be JSON; it is shown as it was
        else:
            arguments = parsed if isinstance(parsed, dict) else arguments
        guard = self.vocabulary.specials.guard_value
        function = {"name": guard(call.name), "arguments": guard(arguments)}
        return {"type": "function", "id": guard(call.id), "function": function}


def _placeholders(config: Mapping[str, Any]) -> dict[int, Modality]:
    """Placeholder token ids of a config.json; older files spell the key `*_token_index`."""
    kinds: dict[int, Modality] = {}
    for modality in Modality:
        for key in (f"{modality.value}_token_id", f"{modality.value}_token_index"):
            token_id = config.get(key)
            if isinstance(token_id, int):
                kinds.setdefault(token_id, modality)
    return kinds


def _no_slot(messages: Sequence[Message]) -> InvalidRequest:
    """Blames the first turn with media that is not the user's; else all of them."""
    for message in messages:
        media = [part for part in message.parts if isinstance(part, MediaPart)]
        if media and message.role is not Role.USER:
            return InvalidRequest(
                f"the model's chat template takes no media in {message.role.value} messages",
                param=media[0].param or "messages",
            )
    return InvalidRequest("the model's chat template has no slot for these media", param="messages")
