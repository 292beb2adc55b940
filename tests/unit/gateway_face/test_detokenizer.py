"""Whole characters only, stop strings exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chiasm.checkpoint import resolve_model
from gateway.detokenizer import Detokenizer, Manner, StopStrings
from gateway.vocabulary import Vocabulary
from tests.unit.gateway_face.checkpoints import save_metaspace

VOCABULARY = Vocabulary(resolve_model("demo"))
# Bytes are tokens of their own in a byte-level vocabulary: any text, any cut.
BYTE_IDS = {VOCABULARY.bytes_of(i): i for i in range(384) if len(VOCABULARY.bytes_of(i)) == 1}
FAMILY = "👨‍👩‍👧‍👦"
THAI = "ภาษาไทย"


def byte_ids(text: bytes) -> list[int]:
    return [BYTE_IDS[bytes([byte])] for byte in text]


def spoken(
    ids: list[int], *, stop: tuple[str, ...] = (), cuts: list[int]
) -> tuple[list[str], bool]:
    """Pieces of ids pushed in groups of the given sizes."""
    detokenizer = Detokenizer(VOCABULARY, Manner(stop=stop))
    pieces, at = [], 0
    for size in [*cuts, len(ids)]:
        pieces.append(detokenizer.push(ids[at : at + size]).text)
        at += size
    pieces.append(detokenizer.flush())
    return pieces, detokenizer.stopped


CUTS = st.lists(st.integers(1, 5), max_size=40)


@given(st.text(max_size=40), CUTS)
@settings(max_examples=200, deadline=None)
def test_pieces_are_the_whole_text_at_any_cut(text: str, cuts: list[int]) -> None:
    pieces, stopped = spoken(byte_ids(text.encode()), cuts=cuts)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert not stopped


@given(st.lists(st.integers(0, 399), max_size=60), CUTS)
@settings(max_examples=200, deadline=None)
def test_any_ids_decode_as_the_tokenizer_decodes_them(ids: list[int], cuts: list[int]) -> None:
    whole = VOCABULARY.decode(ids)
    said = "".join(spoken(ids, cuts=cuts)[0])
    # The documented rule: a character left open at the end is dropped, not replaced.
    assert whole.startswith(said)
    assert whole[len(said) :] in ("", "\ufffd")


@pytest.mark.parametrize("text", ["é", "日本語", "😀", FAMILY, THAI])
def test_a_character_cut_off_at_the_end_is_dropped(text: str) -> None:
    raw = text.encode()[:-1]
    said = "".join(spoken(byte_ids(raw), cuts=[1] * len(raw))[0])
    assert said == text[:-1]


def test_bytes_the_model_truly_got_wrong_show_as_replacement_characters() -> None:
    pieces, _ = spoken(byte_ids(b"a\xff\xfeb"), cuts=[1, 1, 1, 1])
    assert "".join(pieces) == "a\ufffd\ufffdb"


@pytest.mark.parametrize("tail", [b"\xed\xa0", b"\xed\xbf"])
def test_half_a_surrogate_at_the_end_is_wrong_not_open(tail: bytes) -> None:
    """No third byte makes a character of it."""
    for cuts in ([1, 1, 1], [3]):
        assert "".join(spoken(byte_ids(b"a" + tail), cuts=cuts)[0]) == "a\ufffd\ufffd"
    assert "".join(spoken(byte_ids(b"a\xed\x9f"), cuts=[1, 1, 1])[0]) == "a"


def test_special_tokens_have_no_text() -> None:
    (end,) = VOCABULARY.encode_with_specials("<|im_end|>")
    pieces, _ = spoken([*byte_ids(b"a"), end, *byte_ids(b"b")], cuts=[1, 1])
    assert "".join(pieces) == "ab"


LETTERS = st.text(alphabet="abcé", max_size=30)
STOPS = st.lists(st.text(alphabet="abcé", min_size=1, max_size=5), min_size=1, max_size=4)


@given(LETTERS, STOPS, CUTS)
@settings(max_examples=500, deadline=None)
def test_text_ends_before_the_leftmost_stop_however_it_was_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    stop = tuple(stops)
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    pieces, stopped = spoken(byte_ids(text.encode()), stop=stop, cuts=cuts)
    assert "".join(pieces) == (text[: min(found)] if found else text)
    assert stopped == bool(found)


@given(LETTERS, STOPS)
@settings(max_examples=200, deadline=None)
def test_only_a_true_prefix_of_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopStrings(tuple(stops))
    said = ""
    for index, char in enumerate(text):
        said += matcher.push(char)
        if matcher.found:
            break
        held = text[len(said) : index + 1]
        assert not held or any(s.startswith(held) and s != held for s in stops)


def test_a_half_produced_stop_string_is_released_at_the_end() -> None:
    pieces, stopped = spoken(byte_ids(b"HIJKLMN"), stop=("KLMNOPQ",), cuts=[1] * 7)
    assert pieces[:3] == ["H", "I", "J"]
    assert pieces[3:-1] == [""] * 5
    assert pieces[-1] == "KLMN"
    assert not stopped


def test_the_longer_stop_that_began_first_wins_when_it_completes() -> None:
    assert spoken(byte_ids(b"xabcd"), stop=("bc", "abcd"), cuts=[1] * 5) == (
        ["x", "", "", "", "", "", ""],
        True,
    )
    pieces, stopped = spoken(byte_ids(b"xabce"), stop=("bc", "abcd"), cuts=[1] * 5)
    assert "".join(pieces) == "xa"
    assert stopped


def test_a_vocabulary_of_pieces_and_fallback_bytes(tmp_path: Path) -> None:
    vocabulary = Vocabulary(save_metaspace(tmp_path))
    text = "a bird 😀 ok. ไทย"
    ids = vocabulary.encode(text)
    detokenizer = Detokenizer(vocabulary)
    pieces = [detokenizer.push([i]).text for i in ids]
    assert "".join([*pieces, detokenizer.flush()]) == text
    assert not any("\ufffd" in piece for piece in pieces)
    cut = Detokenizer(vocabulary)
    assert "".join(cut.push([i]).text for i in ids[:-1]) + cut.flush() == text[:-1]
