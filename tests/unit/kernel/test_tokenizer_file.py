"""Tokenizers that lie in other files than tokenizer.json: same ids as from it, or as the library's.

SentencePiece's own library trains a small model here and is what ours is compared with.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from chiasm.checkpoint import read_config
from chiasm.digest import tokenizer_digest
from chiasm.tokenizer_file import added_token, read_tokenizer
from decoder_svc.sampling.grammar import GrammarCompiler
from gateway.detokenizer import Detokenizer
from gateway.vocabulary import Vocabulary
from tests.unit.gateway_face.checkpoints import save_qwen_like

TEXTS = (
    "the quick brown fox's jumper",
    "  two  spaces\n\n\tand a tab\r\n",
    "日本語 ไทย émoji 😀 été 0123456789",
    '<|im_start|>user\nhi<|im_end|> {"a": [1, 2]} <tool_call> [INST]',
    "",
)
ALPHABET = [*"abcdefgh tionse  .,'<>|_0123\n\té漢字語😀ßñ", "the ", "and ", " a", "<|im_start|>"]


def random_texts(count: int) -> list[str]:
    draw = random.Random(3)
    return ["".join(draw.choices(ALPHABET, k=draw.randint(1, 40))) for _ in range(count)]


def decoder_of(spec: dict[str, Any]) -> dict[str, Any]:
    """added_tokens_decoder, of a tokenizer.json."""
    return {
        str(token["id"]): {key: value for key, value in token.items() if key != "id"}
        for token in spec["added_tokens"]
    }


# --- vocab.json and merges.txt ------------------------------------------------------------------


@pytest.fixture(name="merges")
def merges_(tmp_path: Path) -> tuple[Path, Path]:
    """The same tokenizer as tokenizer.json, and as older files."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    save_qwen_like(whole)
    shutil.copytree(whole, parts)
    spec = json.loads((parts / "tokenizer.json").read_text())
    (parts / "tokenizer.json").unlink()
    names = {token["content"] for token in spec["added_tokens"]}
    vocab = {text: i for text, i in spec["model"]["vocab"].items() if text not in names}
    (parts / "vocab.json").write_text(json.dumps(vocab))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in spec["model"]["merges"]), ""]
    (parts / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": decoder_of(spec)}
    (parts / "tokenizer_config.json").write_text(json.dumps(config))
    return whole, parts


def test_merges_give_the_ids_of_the_whole_file(merges: tuple[Path, Path]) -> None:
    whole, parts = map(Vocabulary, merges)
    assert whole.size == parts.size and whole.special_ids == parts.special_ids
    for text in [*TEXTS, *random_texts(300)]:
        assert parts.encode(text) == whole.encode(text)
        ids = parts.encode_with_specials(text)
        assert ids == whole.encode_with_specials(text)
        assert parts.decode(ids, skip_special=False) == text


def test_added_tokens_of_older_files_still(merges: tuple[Path, Path]) -> None:
    whole, parts = merges
    config = json.loads((parts / "tokenizer_config.json").read_text())
    added = config.pop("added_tokens_decoder")
    (parts / "tokenizer_config.json").write_text(json.dumps(config))
    names = {token["content"]: int(index) for index, token in added.items()}
    (parts / "added_tokens.json").write_text(json.dumps(names))
    text = TEXTS[3]
    expected = Vocabulary(whole).encode_with_specials(text)
    assert Vocabulary(parts).encode_with_specials(text) == expected
    assert added_token(parts, "<|image_pad|>") == added_token(whole, "<|image_pad|>")


def test_what_is_not_known_is_refused(merges: tuple[Path, Path], tmp_path: Path) -> None:
    _, parts = merges
    path = parts / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "tokenizer_class": "GPT2Tokenizer"}))
    with pytest.raises(ValueError, match="'GPT2Tokenizer' is none of Qwen2Tokenizer"):
        read_tokenizer(parts)
    later = {**config["added_tokens_decoder"], "9000": {"content": "<far>"}}
    path.write_text(json.dumps({**config, "added_tokens_decoder": later}))
    with pytest.raises(ValueError, match=r"leave gaps"):
        read_tokenizer(parts)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no tokenizer\.json, nor .* nor tokenizer\.model"):
        read_tokenizer(tmp_path / "empty")


# --- tokenizer.model ----------------------------------------------------------------------------


def save_pieces(directory: Path, **settings: Any) -> Any:
    """Trains a model like InternLM2's: bytes, no leading space, text kept. Returns its user."""
    library = pytest.importorskip("sentencepiece", reason="`make setup` installs sentencepiece")
    directory.mkdir(exist_ok=True)
    corpus = [line for text in (*TEXTS, *random_texts(200)) for line in text.splitlines()]
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus * 3),
        model_prefix=str(directory / "tokenizer"),
        **{
            "model_type": "bpe",
            "vocab_size": 400,
            "byte_fallback": True,
            "character_coverage": 0.98,
            "normalization_rule_name": "identity",
            "add_dummy_prefix": False,
            "remove_extra_whitespaces": False,
            "user_defined_symbols": ["[UNUSED_1]", "[UNUSED_2]", "<b>"],
            "minloglevel": 2,
            **settings,
        },
    )
    pieces = library.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    unused = pieces.piece_to_id("[UNUSED_1]")
    added = {
        "1": {"content": "<s>", "special": True},
        "2": {"content": "</s>", "special": True},
        str(unused): {"content": "<|im_start|>", "special": True},
        str(unused + 1): {"content": "<|im_end|>", "special": True},
        "400": {"content": "<IMG_CONTEXT>", "special": True},
    }
    config = {"tokenizer_class": "InternLM2Tokenizer", "added_tokens_decoder": added}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return pieces


def test_pieces_give_the_ids_of_their_library(tmp_path: Path) -> None:
    pieces = save_pieces(tmp_path / "m")
    vocabulary = Vocabulary(tmp_path / "m")
    for text in [*TEXTS[:3], "<b>bold <b", *random_texts(500)]:
        plain = text.replace("<|im_start|>", "")
        expected = pieces.encode(plain)
        assert vocabulary.encode(plain) == expected, plain
        said = pieces.decode(expected).removeprefix(" ")  # as InternLM2's own decoder
        assert vocabulary.decode(expected) == said, plain


def test_added_tokens_take_the_place_of_unused_pieces(tmp_path: Path) -> None:
    pieces = save_pieces(tmp_path / "m")
    vocabulary = Vocabulary(tmp_path / "m")
    begin = pieces.piece_to_id("[UNUSED_1]")
    ids = vocabulary.encode_with_specials("<|im_start|>the<IMG_CONTEXT><|im_end|>")
    assert ids == [begin, *pieces.encode("the"), 400, begin + 1]
    assert vocabulary.encode("<|im_start|>") == pieces.encode("<|im_start|>")
    assert begin not in vocabulary.encode("[UNUSED_1]"), "its old name is text"
    assert vocabulary.size == 401
    config = {"llm_config": {"vocab_size": 401}, "model_type": "internvl_chat"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path / "m")["image_token_id"] == 400


def test_pieces_become_bytes_and_text_piece_by_piece(tmp_path: Path) -> None:
    pieces = save_pieces(tmp_path / "m")
    vocabulary = Vocabulary(tmp_path / "m")
    text = "the 漢字 end ☃ of  it"
    ids = pieces.encode(text)
    assert b"".join(map(vocabulary.bytes_of, ids)).decode() == text
    reader = Detokenizer(vocabulary)
    assert "".join(reader.push([one]).text for one in ids) + reader.flush() == text


def test_grammars_work_over_pieces(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    pieces = save_pieces(tmp_path / "m")
    compiler = GrammarCompiler(tmp_path / "m", vocab_size=401, eos_token_ids=(2,))
    assert compiler.available
    matcher = compiler.compile('start: "the end" | "tin"')
    for token in pieces.encode("the end"):
        assert matcher.consume_token(token), pieces.id_to_piece(token)
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "unigram"}, "no BPE model"),
        ({"normalization_rule_name": "nfkc"}, "rewrites text"),
        ({"remove_extra_whitespaces": True}, "rewrites text"),
        ({"add_dummy_prefix": True}, "rewrites text"),
    ],
)
def test_models_that_work_otherwise_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    save_pieces(tmp_path / "m", **settings)
    with pytest.raises(ValueError, match=message):
        read_tokenizer(tmp_path / "m")


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match="cannot be read"):
        read_tokenizer(tmp_path)


def test_the_digest_covers_all_files(merges: tuple[Path, Path]) -> None:
    _, parts = merges
    before = tokenizer_digest(parts)
    (parts / "merges.txt").write_text((parts / "merges.txt").read_text() + "a b\n")
    assert tokenizer_digest(parts) != before


def test_the_whole_file_comes_first(merges: tuple[Path, Path]) -> None:
    whole, parts = merges
    shutil.copyfile(whole / "tokenizer.json", parts / "tokenizer.json")
    spec = read_tokenizer(parts)
    assert spec == json.loads((whole / "tokenizer.json").read_text())
    assert Tokenizer.from_str(json.dumps(spec)).get_vocab_size() == Vocabulary(whole).size
