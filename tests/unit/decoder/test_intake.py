"""What the decoder refuses at the door, and by which name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from chiasm.demo import checkpoint_dir
from chiasm.errors import ChiasmError, InvalidRequest, ModelNotFound, TooLarge
from chiasm.plan import Grid, Modality
from chiasm.v1 import common_pb2, decoder_pb2
from decoder_svc.config import TextConfig, read_text_config
from decoder_svc.intake import Intake
from tests.unit.decoder.simulation import Picture, make_request

DEMO = read_text_config(checkpoint_dir())
IMAGE, VIDEO = DEMO.image_token_id, DEMO.video_token_id
LIMIT = 64


@pytest.fixture(name="intake")
def intake_() -> Intake:
    return Intake(DEMO, max_model_len=LIMIT, max_choices=8)


def start(
    ids: list[int], promises: list[decoder_pb2.Promise] | None = None, **sampling: Any
) -> decoder_pb2.GenerateStart:
    return decoder_pb2.GenerateStart(
        context=common_pb2.RequestContext(request_id="r", cache_salt=b"s", priority=3),
        prompt_token_ids=ids,
        promises=promises or [],
        sampling=decoder_pb2.SamplingParams(**{"seed": 1, **sampling}),
    )


def promise(offset: int, *, rows: int = 4, item: int = 0, **changes: Any) -> decoder_pb2.Promise:
    (made,) = make_request("r", [Picture("p", rows)]).promises
    plan = replace(made.plan, grids=(Grid(1, 2, 2 * rows),), **changes)
    return replace(made, item=item, prompt_offset=offset, plan=plan).to_proto()


def refused(intake: Intake, message: decoder_pb2.GenerateStart) -> ChiasmError:
    with pytest.raises(ChiasmError) as caught:
        intake.admit(message)
    return caught.value


def test_a_request_is_translated(intake: Intake) -> None:
    message = start([5, 6], max_tokens=7, temperature=0.5, top_k=3, stop_token_ids=[9], n=2)
    add = intake.admit(message)
    assert (add.request_id, add.prompt_ids, add.cache_salt, add.priority) == ("r", (5, 6), b"s", 3)
    params = add.sampling
    assert (params.max_tokens, params.temperature, params.top_k, params.n) == (7, 0.5, 3, 2)
    assert (params.top_p, params.repetition_penalty, params.top_logprobs) == (1.0, 1.0, None)
    assert params.stop_token_ids == (*DEMO.eos_token_ids, 9)
    assert intake.admit(start([5], ignore_eos=True)).sampling.stop_token_ids == ()


@pytest.mark.parametrize(
    ("prompt", "asked", "granted"),
    [(10, 0, 54), (10, 1, 1), (10, 54, 54), (10, 55, 54), (10, 10**9, 54), (63, 0, 1), (63, 9, 1)],
)
def test_max_tokens_is_what_is_left_at_most(
    intake: Intake, prompt: int, asked: int, granted: int
) -> None:
    assert intake.admit(start([5] * prompt, max_tokens=asked)).sampling.max_tokens == granted


@pytest.mark.parametrize("prompt", [64, 65, 1000])
def test_a_prompt_without_room_for_an_answer_is_too_large(intake: Intake, prompt: int) -> None:
    error = refused(intake, start([5] * prompt))
    assert isinstance(error, TooLarge)
    assert error.param == "messages" and str(prompt) in error.message


def test_max_tokens_are_computed_from_the_prompt_with_its_media(intake: Intake) -> None:
    add = intake.admit(start([5, *[IMAGE] * 4, 6], [promise(1)]))
    assert add.sampling.max_tokens == LIMIT - 6


@pytest.mark.parametrize(
    ("ids", "sampling", "param"),
    [
        ([], {}, "prompt_token_ids"),
        ([DEMO.vocab_size], {}, "prompt_token_ids"),
        ([2**32 - 1], {}, "prompt_token_ids"),
        ([5], {"stop_token_ids": [DEMO.vocab_size]}, "stop_token_ids"),
        ([5], {"logit_bias": [{"token_id": DEMO.vocab_size, "bias": 1}]}, "logit_bias"),
        ([5], {"logit_bias": [{"token_id": 3, "bias": 1000}]}, "logit_bias"),
        ([5], {"logit_bias": [{"token_id": 3, "bias": float("nan")}]}, "logit_bias"),
        ([5], {"temperature": 2.5}, "temperature"),
        ([5], {"temperature": -1}, "temperature"),
        ([5], {"top_p": 1.5}, "top_p"),
        ([5], {"min_p": -0.5}, "min_p"),
        ([5], {"presence_penalty": 3}, "presence_penalty"),
        ([5], {"repetition_penalty": -1}, "repetition_penalty"),
        ([5], {"top_logprobs": 21}, "top_logprobs"),
        ([5], {"n": 9}, "n"),
        ([5], {"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ],
)
def test_a_wrong_field_is_named(
    intake: Intake, ids: list[int], sampling: dict[str, Any], param: str
) -> None:
    error = refused(intake, start(ids, **sampling))
    assert isinstance(error, InvalidRequest)
    assert error.param == param


def test_an_adapter_is_not_found(intake: Intake) -> None:
    message = start([5])
    message.context.adapter_id = "mine"
    assert isinstance(refused(intake, message), ModelNotFound)


PICTURE = [IMAGE] * 4


@pytest.mark.parametrize(
    ("ids", "promises", "param"),
    [
        ([5, *PICTURE], [], "prompt_token_ids"),  # nobody promised them
        ([5, *PICTURE, IMAGE], [promise(1)], "prompt_token_ids"),  # one more than promised
        ([5, *PICTURE, VIDEO], [promise(1)], "prompt_token_ids"),
        ([5, IMAGE, IMAGE, IMAGE, 6], [promise(1)], "promises[0]"),  # one fewer
        ([5, *PICTURE], [promise(0)], "promises[0]"),  # elsewhere
        ([5, *PICTURE], [promise(2)], "promises[0]"),  # leaves the prompt
        ([5, *[VIDEO] * 4], [promise(1)], "promises[0]"),  # another kind
        ([*PICTURE, *PICTURE], [promise(0), promise(2, item=1)], "promises[1]"),  # overlap
        ([*PICTURE, *PICTURE], [promise(4, item=1), promise(0)], "prompt_token_ids"),  # order
        ([*PICTURE, *PICTURE], [promise(0), promise(4)], "promises"),  # one item twice
        (PICTURE, [promise(0, digest=b"short")], "promises[0]"),
        (PICTURE, [promise(0, family="other")], "promises[0]"),
        (PICTURE, [promise(0, seconds_per_grid=float("inf"))], "promises[0]"),
        (PICTURE, [promise(0, seconds_per_grid=1e12)], "promises[0]"),
    ],
)
def test_promises_and_placeholders_must_agree(
    intake: Intake, ids: list[int], promises: list[decoder_pb2.Promise], param: str
) -> None:
    error = refused(intake, start(ids, promises))
    assert isinstance(error, InvalidRequest)
    assert error.param == param


@pytest.mark.parametrize(
    "grids",
    [
        [],
        [(1, 2, 8), (1, 2, 8)],
        [(1, 2, 6)],
        [(1, 3, 8)],
        [(0, 2, 8)],
        [(2, 2, 8)],
    ],
)
def test_a_grid_must_yield_the_rows_promised(
    intake: Intake, grids: list[tuple[int, int, int]]
) -> None:
    message = promise(0)
    del message.plan.grids[:]
    message.plan.grids.extend(common_pb2.Grid(t=t, h=h, w=w) for t, h, w in grids)
    assert refused(intake, start(PICTURE, [message])).param == "promises[0]"


def test_parts_must_cover_their_rows(intake: Intake) -> None:
    message = promise(0)
    message.parts[0].rows.end = 3
    assert refused(intake, start(PICTURE, [message])).param == "promises"
    message.parts[0].rows.begin = 4
    assert refused(intake, start(PICTURE, [message])).param == "promises"


def test_a_replay_is_kept_apart_from_the_prompt(intake: Intake) -> None:
    message = start([5, 6], n=2)
    message.resume_from.add(choice=1, output_ids=[7, 8])
    add = intake.admit(message)
    assert (add.prompt_ids, add.resume) == ((5, 6), ((), (7, 8)))
    message.resume_from.add(choice=2)
    assert refused(intake, message).param == "resume_from"
    del message.resume_from[:]
    message.resume_from.add(choice=0, output_ids=[DEMO.vocab_size])
    assert refused(intake, message).param == "resume_from"
    del message.resume_from[:]
    message.resume_from.add(choice=0, output_ids=[7] * LIMIT)
    assert isinstance(refused(intake, message), TooLarge)


def test_a_clip_is_checked_as_a_clip(intake: Intake) -> None:
    message = promise(0, modality=Modality.VIDEO, seconds_per_grid=1.0)
    add = intake.admit(start([VIDEO] * 4, [message]))
    assert add.promises[0].plan.modality is Modality.VIDEO


def test_text_has_no_grid_positions(intake: Intake) -> None:
    assert intake.admit(start([5, 6])).grid_positions == b""
    text: TextConfig = DEMO
    assert set(text.masked_token_ids) >= {IMAGE, VIDEO}
