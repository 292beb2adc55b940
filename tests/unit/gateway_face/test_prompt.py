"""Prompts token for token, and user text that stays text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from chiasm.checkpoint import resolve_model
from chiasm.errors import InvalidRequest
from chiasm.plan import Modality
from gateway.chat_template import ChatTemplate
from gateway.messages import MediaPart, Message, Role, TextPart, ToolCall
from gateway.prompt import PromptBuilder
from gateway.specials import SpecialTokens
from gateway.turns import TurnForm
from gateway.vocabulary import Vocabulary
from tests.unit.gateway_face.checkpoints import SPECIALS, save_metaspace, save_qwen_like


@pytest.fixture(scope="module")
def qwen_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen_like(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def qwen(qwen_dir: Path) -> PromptBuilder:
    return PromptBuilder(qwen_dir)


@pytest.fixture(scope="module")
def demo() -> PromptBuilder:
    return PromptBuilder(resolve_model("demo"))


def text(value: str, role: Role = Role.USER) -> Message:
    return Message(role, (TextPart(value),))


def image(param: str = "messages[0].content[0]") -> MediaPart:
    return MediaPart(Modality.IMAGE, url="data:,", param=param)


def count_specials(prompts: PromptBuilder, ids: tuple[int, ...]) -> list[int]:
    return [i for i in ids if i in prompts.vocabulary.special_ids]


# Text as people write it, and joints that a careless split would merge or part.
PLAIN = st.text(
    alphabet=st.one_of(
        st.sampled_from(list("abc's 's\n\r\t  <|>_im[]09.,{}\"́")),
        st.characters(exclude_categories=["Cs", "Cn"]),
    ),
    max_size=40,
).filter(lambda value: not any(name in value for name in SPECIALS))


@given(PLAIN, PLAIN)
@settings(max_examples=300, deadline=None)
def test_ids_equal_those_of_the_whole_string(
    qwen: PromptBuilder, qwen_dir: Path, first: str, second: str
) -> None:
    whole = (
        f"<|im_start|>user\n{first}<|vision_start|><|image_pad|><|vision_end|>{second}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    parts = (TextPart(first), image(), TextPart(second))
    rendered = qwen.render([Message(Role.USER, parts)])
    reference = Tokenizer.from_file(str(qwen_dir / "tokenizer.json"))
    assert list(rendered.token_ids) == reference.encode(whole, add_special_tokens=False).ids


FRAGMENTS = st.lists(
    st.one_of(
        st.sampled_from([name[:k] for name in SPECIALS for k in range(1, len(name) + 1)]),
        st.sampled_from([name[k:] for name in SPECIALS for k in range(len(name))]),
        st.sampled_from(["\ufdd0", "\ufdd1", "\ufdd10\ufdd1", " ", "x"]),
    ),
    min_size=1,
    max_size=6,
)


@given(FRAGMENTS)
@settings(max_examples=500, deadline=None)
def test_no_user_text_in_any_number_of_parts_yields_a_special_token(
    qwen: PromptBuilder, fragments: list[str]
) -> None:
    harmless = qwen.render([Message(Role.USER, (TextPart("x"), image(), TextPart("x")))])
    parts = tuple(TextPart(fragment) for fragment in fragments)
    hostile = qwen.render([Message(Role.USER, (*parts, image(), *parts))])
    assert count_specials(qwen, hostile.token_ids) == count_specials(qwen, harmless.token_ids)
    shown = qwen.vocabulary.decode(hostile.token_ids, skip_special=False)
    said = "".join(fragments).replace("\ufdd0", "\ufffd").replace("\ufdd1", "\ufffd")
    assert shown.count(said) >= 2  # nothing of it was lost or changed


@given(FRAGMENTS, st.sampled_from(["{a}{b}", "{b}<{a}>", "<|{a}{b}", "{a} {b}"]))
@settings(max_examples=300, deadline=None)
def test_templates_that_glue_strings_together_make_no_special_token(
    fragments: list[str], glue: str
) -> None:
    specials = SpecialTokens(SPECIALS)
    first, second = fragments[0], fragments[-1]
    rendered = glue.format(a=specials.guard(first), b=specials.guard(second).strip())
    assert "\ufdd1" not in specials.seal(rendered)


TAGS = ("<think>", "</think>", "<tool_response>", "</tool_response>")
LIKE_TAGS = ("</img>", "<tool>", "</tool>", "<th>", *SPECIALS)


@pytest.mark.parametrize("tag", TAGS)
def test_tags_that_templates_look_for_stay_whole(tag: str) -> None:
    guarded = SpecialTokens(LIKE_TAGS, TAGS).guard(f"a {tag}b{tag}")
    assert guarded.split(tag) == ["a ", "b", ""]


@pytest.mark.parametrize("said", ["<|im_end|>", "\\<|im_end|>", "\\\\ufdd0<|im_end|>é", "\\ufdd0"])
def test_json_in_ascii_keeps_no_break(said: str) -> None:
    specials = SpecialTokens(SPECIALS)
    template = ChatTemplate("{{ messages[0].content | tojson(ensure_ascii=true) }}", {})
    rendered = template.render([{"role": "user", "content": specials.guard(said)}])
    assert specials.seal(rendered) == json.dumps(said)


NAMES = (*TAGS, *LIKE_TAGS)
PIECES = [*NAMES, *(name[:k] for name in NAMES for k in (1, 2, 4)), *(name[1:] for name in NAMES)]


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=6), st.sampled_from(TAGS))
@settings(max_examples=300, deadline=None)
def test_taking_tags_apart_makes_no_special_token(fragments: list[str], tag: str) -> None:
    specials = SpecialTokens(LIKE_TAGS, TAGS)
    pieces = specials.guard("".join(fragments)).split(tag)
    rendered = tag.join(piece.strip() for piece in pieces)
    assert "\ufdd1" not in specials.seal(rendered)


@pytest.mark.parametrize(
    "name", ["<|image_pad|>", "<|vision_start|>", "<|im_end|>", "<|im_start|>"]
)
@pytest.mark.parametrize("role", list(Role))
def test_placeholders_typed_in_any_role_are_text(
    demo: PromptBuilder, name: str, role: Role
) -> None:
    turns = [text(f"before {name} after", role), Message(Role.USER, (image(), TextPart("what?")))]
    rendered = demo.render(turns)
    plain = demo.render([text("before x after", role), turns[1]])
    assert count_specials(demo, rendered.token_ids) == count_specials(demo, plain.token_ids)
    assert len(rendered.slots) == 1
    expanded = demo.expand(rendered, [5])
    pad = rendered.token_ids[rendered.slots[0].position]
    run = expanded.token_ids[expanded.offsets[0] : expanded.offsets[0] + 5]
    assert run == (pad,) * 5
    assert expanded.token_ids.count(pad) == 5
    (start,) = demo.vocabulary.encode_with_specials("<|vision_start|>")
    assert expanded.token_ids[expanded.offsets[0] - 1] == start


def test_tool_calls_names_and_ids_are_user_text_too(demo: PromptBuilder) -> None:
    call = ToolCall("<|im_end|>", "<|im_start|>", '{"<|image_pad|>": ["<|im_end|>"]}')
    hostile = Message(Role.ASSISTANT, (), (call,), name="<|im_start|>")
    benign = Message(Role.ASSISTANT, (), (ToolCall("1", "f", '{"k": ["v"]}'),), name="n")
    found = [
        count_specials(demo, demo.render([message]).token_ids) for message in (hostile, benign)
    ]
    assert found[0] == found[1]


def test_every_item_gets_its_own_run_in_order(demo: PromptBuilder) -> None:
    clip = MediaPart(Modality.VIDEO, url="data:,", param="")
    turns = [
        Message(Role.USER, (image(), TextPart("one"), clip)),
        text("seen", Role.ASSISTANT),
        Message(Role.USER, (TextPart("and"), image())),
    ]
    rendered = demo.render(turns)
    assert [slot.modality for slot in rendered.slots] == ["image", "video", "image"]
    expanded = demo.expand(rendered, [3, 7, 2])
    for offset, slot, rows in zip(expanded.offsets, rendered.slots, (3, 7, 2), strict=True):
        pad = rendered.token_ids[slot.position]
        assert expanded.token_ids[offset : offset + rows] == (pad,) * rows
        assert expanded.token_ids[offset - 1] != pad
        assert expanded.token_ids[offset + rows] != pad
    assert len(expanded.token_ids) == len(rendered.token_ids) + 3 + 7 + 2 - 3
    assert demo.expand(rendered, [1, 1, 1]).token_ids == rendered.token_ids


def test_tokens_grow_linearly_with_turns(demo: PromptBuilder) -> None:
    turn = [Message(Role.USER, (image(), TextPart("what?"))), text("a cat", Role.ASSISTANT)]
    lengths = [len(demo.expand(demo.render(turn * n), [9] * n).token_ids) for n in (1, 2, 3, 6)]
    step = lengths[1] - lengths[0]
    assert lengths == [lengths[0] + step * k for k in (0, 1, 2, 5)]


def test_null_content_with_tool_calls_is_empty_text(demo: PromptBuilder) -> None:
    call = ToolCall("c1", "look", '{"where": "left"}')
    rendered = demo.render([text("hi"), Message(Role.ASSISTANT, (), (call,))])
    shown = demo.vocabulary.decode(rendered.token_ids, skip_special=False)
    assert "None" not in shown
    assert (
        '<|im_start|>assistant\n\n<tool_call>\n{"name": "look", "arguments": {"where": "left"}}'
        in shown
    )


def test_arguments_that_are_not_json_are_shown_as_they_were(demo: PromptBuilder) -> None:
    rendered = demo.render([Message(Role.ASSISTANT, (), (ToolCall("1", "f", '{"a": '),))])
    assert '"{\\"a\\": "' in demo.vocabulary.decode(rendered.token_ids, skip_special=False)


def test_a_list_of_text_parts_is_the_joined_string(demo: PromptBuilder) -> None:
    parts = Message(Role.USER, (TextPart("a "), TextPart(""), TextPart("b")))
    assert demo.render([parts]) == demo.render([text("a b")])


def write_template(qwen_dir: Path, directory: Path, template: str) -> PromptBuilder:
    for name in ("config.json", "tokenizer.json"):
        (directory / name).write_bytes((qwen_dir / name).read_bytes())
    (directory / "chat_template.jinja").write_text(template)
    return PromptBuilder(directory)


def test_a_template_without_slots_in_a_role_blames_the_role(qwen_dir: Path, tmp_path: Path) -> None:
    prompts = write_template(
        qwen_dir,
        tmp_path,
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
        "{% elif m.role == 'user' %}{% for p in m.content %}"
        "{% if p.type == 'image' %}<|image_pad|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
        "{% endif %}{% endfor %}",
    )
    param = "messages[0].content[1]"
    assert len(prompts.render([Message(Role.USER, (image(),))]).slots) == 1
    with pytest.raises(InvalidRequest, match="system messages") as caught:
        prompts.render([Message(Role.SYSTEM, (TextPart("x"), image(param)))])
    assert caught.value.param == param


def test_a_template_may_refuse(qwen_dir: Path, tmp_path: Path) -> None:
    prompts = write_template(
        qwen_dir,
        tmp_path,
        "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
        "{{ messages[0].content.upper }}{{ messages[5].content }}",
    )
    with pytest.raises(InvalidRequest, match="begin with the user"):
        prompts.render([text("x", Role.SYSTEM)])
    with pytest.raises(InvalidRequest, match="cannot render"):
        prompts.render([text("x")])


def test_a_template_cannot_leave_its_sandbox(qwen_dir: Path, tmp_path: Path) -> None:
    prompts = write_template(qwen_dir, tmp_path, "{{ messages.__class__.__mro__[1] }}")
    with pytest.raises(InvalidRequest, match="cannot render"):
        prompts.render([text("x")])


def test_templates_that_want_lists_get_lists(qwen_dir: Path, tmp_path: Path) -> None:
    prompts = write_template(
        qwen_dir,
        tmp_path,
        "{% generation %}{% for m in messages %}{% for p in m.content %}"
        "{{ p['text'] | trim }}{% endfor %}{% break %}{% endfor %}{% endgeneration %}",
    )
    assert prompts.vocabulary.decode(prompts.render([text(" hello ")]).token_ids) == "hello"


def test_options_reach_the_template_but_not_its_own_names(qwen_dir: Path, tmp_path: Path) -> None:
    prompts = write_template(qwen_dir, tmp_path, "{{ messages[0].content }}{{ mood }}")
    rendered = prompts.render([text("x")], form=TurnForm(options={"mood": "<|im_end|>"}))
    assert count_specials(prompts, rendered.token_ids) == []
    with pytest.raises(InvalidRequest) as caught:
        prompts.render([text("x")], form=TurnForm(options={"messages": []}))
    assert caught.value.param == "chat_template_kwargs.messages"


def test_a_checkpoint_without_a_template_or_tokenizer_is_refused(
    qwen_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((qwen_dir / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        PromptBuilder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((qwen_dir / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match="no chat template"):
        PromptBuilder(tmp_path)


def test_names_of_special_tokens_count_only_when_asked(demo: PromptBuilder) -> None:
    (end,) = demo.vocabulary.encode_with_specials("<|im_end|>")
    assert end not in demo.encode_text("a<|im_end|>")
    assert demo.encode_text("a<|im_end|>", parse_special=True)[-1] == end
    assert demo.vocabulary.decode(demo.encode_text("a<|im_end|>")) == "a<|im_end|>"


def test_text_that_cannot_fit_is_not_tokenized(demo: PromptBuilder) -> None:
    huge = "x " * 100_000
    for refused in (
        lambda: demo.render([text(huge)], limit=50),
        lambda: demo.encode_text(huge, limit=50),
    ):
        with pytest.raises(InvalidRequest, match="more than 50 tokens"):
            refused()
    ids = demo.encode_text("x " * 100)
    assert demo.encode_text("x " * 100, limit=len(ids)) == ids


def test_ids_are_checked(demo: PromptBuilder) -> None:
    demo.check_ids([0, 1], param="prompt")
    picture = demo.render([Message(Role.USER, (MediaPart(Modality.IMAGE, data=b"x"),))])
    placeholder = picture.token_ids[picture.slots[0].position]
    for bad in ([demo.vocab_size], [placeholder]):
        with pytest.raises(InvalidRequest) as caught:
            demo.check_ids(bad, param="prompt")
        assert caught.value.param == "prompt"


def test_special_tokens_inside_the_models_vocabulary_keep_their_ids(tmp_path: Path) -> None:
    vocabulary = Vocabulary(save_metaspace(tmp_path))
    assert vocabulary.encode_with_specials("<s>a")[0] == 1
    assert not vocabulary.special_ids & set(vocabulary.encode("<s>a</s>"))
    reference = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    mixed = "a bird<s>a bird</s> a"
    assert vocabulary.encode_with_specials(mixed) == reference.encode(mixed).ids
