"""Grammars: what an answer must look like, compiled by llguidance over the checkpoint's tokenizer.

Owns the library, its limits and the tokenizer it sees. Knows nothing of requests. No torch.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chiasm.tokenizer_file import read_tokenizer, tokenizer_files

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

    from decoder_svc.config.from_hf import TextConfig

MOST_SOURCE_BYTES = 256 << 10
_KEPT = 64  # compiled grammars at hand
_MOST_LEXER_STATES = 16_000  # of 1 to 2 kB each, per answer
# One space, or a new line and its indent: a model cannot go on with whitespace for ever.
_WHITESPACE = r"[ ]|\n((  ){0,8}|\t{0,8})"
_JSON_OPTIONS: JsonCompileOptions = {
    "lenient": False,  # a keyword that is not known is an error, never ignored
    "coerce_one_of": False,
    "whitespace_flexible": True,
    "whitespace_pattern": _WHITESPACE,
    "item_separator": ",",
    "key_separator": ":",
}


class GrammarCompiler:
    """Turns grammars into matchers; safe to use from several threads.

    Args:
        model_dir: The checkpoint, for its tokenizer.
        vocab_size: Ids that logits cover.
        eos_token_ids: Ids that end an answer; a grammar allows them where it may end.
    """

    def __init__(self, model_dir: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._model_dir = model_dir
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    @classmethod
    def of(cls, model_dir: Path, text: TextConfig) -> GrammarCompiler:
        """The one of a checkpoint directory."""
        return cls(
            model_dir,
            vocab_size=text.vocab_size,
            eos_token_ids=text.eos_token_ids,
        )

    @property
    def available(self) -> bool:
        """Whether there is a tokenizer to compile grammars over, and the library."""
        return bool(tokenizer_files(self._model_dir) and importlib.util.find_spec("llguidance"))

    def load(self) -> LLTokenizer:
        """Reads the tokenizer, once. Raises ValueError when there is none that can be read."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._read()
            return self._tokenizer

    def compile(self, source: str) -> LLMatcher:
        """A fresh matcher of what `source_of` returned. Raises ValueError saying what is wrong."""
        from llguidance import LLMatcher, LLParserLimits

        with self._lock:
            found = self._compiled.get(source)
            if found is not None:
                self._compiled.move_to_end(source)
                return found.deep_copy()
        limits = LLParserLimits(max_lexer_states=_MOST_LEXER_STATES)
        matcher = LLMatcher(self.load(), source, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(_first_line(matcher.get_error()))
        with self._lock:
            self._compiled[source] = matcher
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return matcher.deep_copy()

    def _read(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        spec = seal(read_tokenizer(self._model_dir))
        return LLTokenizer(
            json.dumps(spec), n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids)
        )


def source_of(kind: str, text: str) -> str:
    """What the library takes, of a field of the message `Grammar`. Raises ValueError."""
    from llguidance import LLMatcher

    if len(text.encode()) > MOST_SOURCE_BYTES:
        raise ValueError(f"it has more than {MOST_SOURCE_BYTES} bytes")
    if kind == "json_schema":
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not JSON: {error}") from None
        if parsed is True:  # any JSON
            text = "{}"
        elif not isinstance(parsed, dict):
            raise ValueError("a schema is an object, or true")
        return str(LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS))
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(text))
    if kind == "lark":
        return str(LLMatcher.grammar_from_lark(text))
    raise ValueError(f"a grammar of kind {kind!r} is not known")


def seal(spec: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json in which added tokens cannot be spelled: grammars name them by id.

    The library tokenizes text that a grammar forces. Were a name such as ``<tool_call>`` in that
    text to become the token of that name, no text would match it.
    """
    vocab = spec["model"].get("vocab")
    for token in spec.get("added_tokens") or []:
        name = token["content"]
        if not (token["special"] or (name.startswith("<") and name.endswith(">"))):
            continue
        token["special"] = True
        token["content"] = f"\ufdd1{token['id']}\ufdd1"
        if isinstance(vocab, dict) and name in vocab:
            vocab[token["content"]] = vocab.pop(name)
        if spec["model"].get("unk_token") == name:
            spec["model"]["unk_token"] = token["content"]
    return spec


def _first_line(error: str) -> str:
    return error.partition("\n")[0][:300]
