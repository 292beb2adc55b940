"""From messages to token ids: the chat template, the tokenizer, one placeholder run per medium.

Owns the rule that user text never yields special tokens and that a medium's rows go where the
template put its slot. Knows nothing of sizes: how many rows an item has is the plan's business.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chiasm.checkpoint import read_config
from chiasm.errors import InvalidRequest
from chiasm.json_file import read_json
from chiasm.plan import Modality, Span
from gateway.chat_template import ChatTemplate
from gateway.dialects import Dialect
from gateway.dialects.grammar import quoted
from gateway.messages import MediaPart, Message, Role
from gateway.placeholders import Places, Script, num_runs
from gateway.turns import TurnForm, left_open, turn_of
from gateway.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one run of a medium goes: the position of the single token that stands for it."""

    position: int
    modality: Modality
    item: int


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Token ids with one placeholder token per run of a medium, and where these are, in order."""

    token_ids: tuple[int, ...]
    slots: tuple[Slot, ...]
    opens_thought: bool = False
    """Whether it ends inside a thought of the assistant's."""


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """Token ids as the decoder takes them, and where the placeholders of every item are."""

    token_ids: tuple[int, ...]
    runs: tuple[tuple[Span, ...], ...] = ()
    opens_thought: bool = False

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first placeholder position of every item."""
        return tuple(runs[0].begin for runs in self.runs)


class PromptBuilder:
    """Builds prompts for one checkpoint.

    Args:
        model_dir: Directory with config.json, tokenizer.json and a chat template.

    Raises:
        ValueError: One of them is missing or unreadable.
    """

    def __init__(self, model_dir: Path) -> None:
        config = read_config(model_dir)
        self.vocabulary = Vocabulary(model_dir)
        self._template = ChatTemplate.from_dir(model_dir)
        family = str(config.get("model_type"))
        self.dialect = Dialect.of(family, self._template.source, self._quote)
        self._kinds = _placeholders(config)
        names = {self.vocabulary.name_of(i): kind for i, kind in self._kinds.items()}
        self._places = Places({**names, **_named_places(model_dir)})
        self._takes_media = self._template.shows({"type": "image"}, self._places.modalities)
        text = config.get("text_config") or {}
        self.vocab_size = int(
            text.get("vocab_size") or config.get("vocab_size") or self.vocabulary.size
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        scripts: Sequence[Script] | None = None,
        form: TurnForm = TurnForm(),  # noqa: B008, frozen
        limit: int = 0,
    ) -> RenderedPrompt:
        """Applies the chat template and tokenizes.

        Args:
            messages: The conversation.
            scripts: Per medium, what stands in its place: text and runs. None = one run each.
            form: How they are to be rendered.
            limit: Most tokens the caller can use; text that must have more is not tokenized.
                0 = any.

        Raises:
            InvalidRequest: The template refuses the messages, or has no slot for one of the media.
        """
        bare = scripts is not None and all(scripts) and not self._takes_media
        text = self._render(messages, form, bare=bare)
        self._check_length(text, limit, "messages")
        media = [
            part.modality
            for message in messages
            for part in message.parts
            if isinstance(part, MediaPart)
        ]
        if self._places.modalities(text) != media:
            raise _no_slot(messages)
        text = self._places.fill(text, scripts)
        ids = self.vocabulary.encode_sealed(self.vocabulary.specials.seal(text))
        return RenderedPrompt(
            tuple(ids), self._slots(ids, media, scripts), self.dialect.opens_thought(text)
        )

    def expand(self, rendered: RenderedPrompt, rows_per_slot: Sequence[int]) -> ExpandedPrompt:
        """Replaces every placeholder token by a run of as many as it stands for.

        Args:
            rendered: What `render` returned.
            rows_per_slot: Rows of every run, in prompt order, all at least 1.
        """
        assert len(rows_per_slot) == len(rendered.slots), "one count per slot"
        ids: list[int] = []
        runs: list[list[Span]] = []
        done = 0
        for slot, rows in zip(rendered.slots, rows_per_slot, strict=True):
            assert rows >= 1, "a run has rows"
            ids.extend(rendered.token_ids[done : slot.position])
            if slot.item == len(runs):
                runs.append([])
            runs[-1].append(Span(len(ids), len(ids) + rows))
            ids.extend([rendered.token_ids[slot.position]] * rows)
            done = slot.position + 1
        ids.extend(rendered.token_ids[done:])
        return ExpandedPrompt(tuple(ids), tuple(map(tuple, runs)), rendered.opens_thought)

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

    def kept_ids(self, *, special: bool, tags: bool) -> frozenset[int]:
        """Special tokens that stay in an answer's text: all, or what the dialect's tags are."""
        if special:
            return self.vocabulary.special_ids
        if not tags:
            return frozenset()
        ids = map(self.vocabulary.added_id, self.dialect.tags)
        return frozenset(i for i in ids if i is not None)

    def _render(self, messages: Sequence[Message], form: TurnForm, *, bare: bool) -> str:
        """With `bare`, media stand in plain text: their scripts bring what encloses them."""
        specials = self.vocabulary.specials
        for name in form.options:
            if name in self._template.reserved:
                raise InvalidRequest(f"{name} may not be set", param=f"chat_template_kwargs.{name}")
        if form.tools and self.dialect.tools is None:
            raise InvalidRequest("the model's chat template takes no tools", param="tools")
        takes_text = self._template.takes_text
        in_text = self._places.mark if bare and takes_text else None
        turns = [
            turn_of(message, specials, takes_text=takes_text, in_text=in_text)
            for message in messages
        ]
        mark = f"\ufdd2{secrets.token_hex(8)}\ufdd2"
        if form.continue_final:
            turns[-1] = left_open(turns[-1], mark)
        text = self._template.render(
            turns,
            options=specials.guard_value(form.options),
            tools=[specials.guard_value(tool.body) for tool in form.tools],
            add_generation_prompt=form.add_generation_prompt and not form.continue_final,
        )
        return text[: text.rindex(mark)] if form.continue_final else text

    def _quote(self, name: str) -> str:
        """A tag as a grammar names it."""
        token_id = self.vocabulary.added_id(name)
        return quoted(name) if token_id is None else f"<[{token_id}]>"

    def _check_length(self, text: str, limit: int, param: str) -> None:
        """Saves tokenizing what cannot fit. Normalizing shortens text 4:1 at most."""
        if limit and len(text) > 4 * self.vocabulary.longest * limit:
            raise InvalidRequest(f"the prompt has more than {limit} tokens", param=param)

    def _slots(
        self, ids: Sequence[int], media: Sequence[Modality], scripts: Sequence[Script] | None
    ) -> tuple[Slot, ...]:
        """The placeholder tokens in `ids`; their order is that of the runs of the media."""
        counts = [num_runs(script) for script in scripts] if scripts else [1] * len(media)
        owners = [item for item, count in enumerate(counts) for _ in range(count)]
        found = [at for at, token in enumerate(ids) if token in self._kinds]
        assert len(found) == len(owners), "one token per run"
        return tuple(Slot(at, media[item], item) for at, item in zip(found, owners, strict=True))


def _placeholders(config: Mapping[str, Any]) -> dict[int, Modality]:
    """Placeholder token ids of a config.json; older files spell the key `*_token_index`."""
    kinds: dict[int, Modality] = {}
    for modality in Modality:
        for key in (f"{modality.value}_token_id", f"{modality.value}_token_index"):
            token_id = config.get(key)
            if isinstance(token_id, int):
                kinds.setdefault(token_id, modality)
    return kinds


def _named_places(model_dir: Path) -> dict[str, Modality]:
    """Placeholders that the tokenizer's file names: such as stand in templates and nowhere else."""
    file = read_json(model_dir / "tokenizer_config.json", optional=True)
    more = file.get("extra_special_tokens")
    named = {**file, **(more if isinstance(more, dict) else {})}
    found = {kind: named.get(f"{kind.value}_token") for kind in Modality}
    return {name: kind for kind, name in found.items() if isinstance(name, str)}


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
