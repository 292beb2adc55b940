"""What crosses to ranks and back arrives as it was sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder_svc.embeddings.events import SlabRun
from decoder_svc.engine.messages import DecodeRows, EmbedSpan, PlannedSequence, StepPlan, StepResult
from decoder_svc.runner.codec import Alive, Failed, Hello, Message, Ready, Start, decode, encode
from decoder_svc.sampling.params import Draw, Sampled, SamplingParams

counts = st.integers(0, 2**40)
ids = st.integers(0, 2**20)
numbers = st.floats(allow_nan=False)


def rows_of(element: st.SearchStrategy, most: int = 6) -> st.SearchStrategy:
    return st.lists(element, max_size=most).map(tuple)


params = st.builds(
    SamplingParams,
    max_tokens=st.integers(8, 2**31),
    min_tokens=st.integers(0, 8),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.001, 1),
    top_k=counts,
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.001, 1000),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=rows_of(ids),
    n=st.integers(1, 128),
    top_logprobs=st.none() | st.integers(0, 20),
    logit_bias=rows_of(st.tuples(ids, st.floats(-100, 100))),
)
draws = st.builds(Draw, params, counts, counts, rows_of(ids), rows_of(ids))
embeds = st.builds(EmbedSpan, counts, rows_of(st.builds(SlabRun, counts, counts), 3))
sequences = st.builds(
    PlannedSequence,
    request_id=st.text(max_size=40),
    choice=counts,
    seat=counts,
    token_ids=rows_of(ids, 30),
    start=counts,
    position=st.integers(-(2**31), 2**31),
    block_table=rows_of(ids, 30),
    first_block=counts,
    grid_positions=st.binary(max_size=60),
    embeds=rows_of(embeds, 3),
    draw=st.none() | draws,
)
sampled = st.builds(
    Sampled, ids, st.booleans(), st.none() | numbers, rows_of(ids), rows_of(numbers)
)
messages = st.one_of(
    st.builds(StepPlan, counts, rows_of(sequences, 4)),
    st.builds(
        StepPlan,
        counts,
        decodes=st.builds(DecodeRows, st.binary(max_size=48), rows_of(draws, 2)),
    ),
    st.builds(StepResult, counts, rows_of(sampled)),
    st.builds(StepResult, counts, token_ids=rows_of(ids)),
    st.builds(Hello, counts),
    st.builds(Start, st.text(max_size=40), counts),
    st.builds(Ready, counts),
    st.builds(Alive),
    st.builds(Failed, st.text(max_size=200), st.booleans()),
)


@given(messages)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    arrived = decode(encode(message))
    assert arrived == message
    assert repr(arrived) == repr(message)  # 1, 1.0 and True are equal, but not the same


@pytest.mark.parametrize("frame", [b"", b"Z\x90", b"S\x90", b"P\x01", b"R\xc1", b"H\x91", b"Ax"])
def test_a_frame_nobody_sent_is_refused(frame: bytes) -> None:
    with pytest.raises(ValueError, match="makes no sense"):
        decode(frame)
