"""Draws: right distribution, right filters, and independent of everything but their own row."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from decoder_svc.sampling.params import Draw, SamplingParams
from decoder_svc.sampling.processors import apply_penalties
from decoder_svc.sampling.random import philox, uniforms
from decoder_svc.sampling.sampler import Sampler

torch.set_num_threads(1)

CPU = torch.device("cpu")
VOCAB = 12


def params(**changes: object) -> SamplingParams:
    return replace(SamplingParams(max_tokens=100), **changes)  # type: ignore[arg-type]


def draw(position: int = 0, choice: int = 0, **changes: object) -> Draw:
    return Draw(params(**changes), choice, position)


def sample(logits: torch.Tensor, draws: list[Draw], masked: tuple[int, ...] = ()) -> list[int]:
    found = Sampler(masked, device=CPU).sample(logits, draws).results()
    assert all(s.finite for s in found)
    return [s.token_id for s in found]


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([v], dtype=np.uint64) for v in values)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [  # known answers of Random123, philox4x32-10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    got = philox(words(*counter), words(*key))  # type: ignore[arg-type]
    assert tuple(int(w[0]) for w in got) == answer


def test_uniforms_are_uniform_and_differ_by_seed_choice_and_position() -> None:
    many = uniforms([7] * 4000, [0] * 4000, list(range(4000)))
    assert many.min() >= 0 and many.max() < 1
    counts, _ = np.histogram(many, bins=10, range=(0, 1))
    assert (abs(counts - 400) < 100).all()
    others = uniforms([7, 8, 7 + 2**32, 7], [0, 0, 0, 1], [0, 0, 0, 0])
    assert len(set(others.tolist())) == 4
    assert uniforms([2**64 - 1], [3], [5])[0] == uniforms([2**64 - 1, 1], [3, 1], [5, 1])[0]


def test_greedy_takes_the_largest_and_never_a_masked_id() -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32).repeat(2, 1)
    draws = [draw(temperature=0.0), draw(temperature=0.0, logit_bias=((11, 100.0),))]
    assert sample(logits, draws) == [11, 11]
    assert sample(logits, draws, masked=(10, 11)) == [9, 9]


def test_draws_follow_the_softmax() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125]))
    draws = [draw(position) for position in range(4000)]
    counts = np.bincount(sample(logits.repeat(4000, 1), draws), minlength=4)
    np.testing.assert_allclose(counts / 4000, [0.5, 0.25, 0.125, 0.125], atol=0.03)


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"top_k": 1}, {3}),
        ({"top_k": 2}, {3, 2}),
        ({"top_p": 0.5}, {3}),
        ({"top_p": 0.55}, {3, 2}),
        ({"top_p": 1e-6}, {3}),
        ({"min_p": 0.5}, {3, 2}),
        ({"min_p": 1.0}, {3}),
        ({"top_k": 3, "top_p": 0.99}, {3, 2, 1}),
        ({}, {3, 2, 1, 0}),
    ],
)
def test_filters_leave_out_what_they_say(settings: dict[str, object], allowed: set[int]) -> None:
    logits = torch.log(torch.tensor([0.05, 0.15, 0.28, 0.52]))
    draws = [draw(position, **settings) for position in range(400)]
    assert set(sample(logits.repeat(400, 1), draws)) == allowed


def test_a_row_is_drawn_the_same_in_any_company() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(8, VOCAB, generator=generator)
    draws = [
        draw(i, seed=i, temperature=0.0 if i == 4 else 0.5 + i / 8, top_k=i % 3, top_p=1 - i / 20)
        for i in range(8)
    ]
    together = sample(logits, draws)
    assert [sample(logits[i : i + 1], draws[i : i + 1])[0] for i in range(8)] == together


def test_a_row_that_is_not_finite_is_told_and_harms_nobody() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, 5] = logits[2, 5] = 50.0
    logits[1] = float("nan")
    found = Sampler((), device=CPU).sample(logits, [draw(), draw(), draw()]).results()
    assert [s.finite for s in found] == [True, False, True]
    assert [found[0].token_id, found[2].token_id] == [5, 5]
    logits[1] = 0.0
    logits[1, 3] = math.inf
    assert not Sampler((), device=CPU).sample(logits, [draw(), draw(), draw()]).results()[1].finite


def test_stop_ids_wait_for_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 5] = 9.0, 8.0
    settings = {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": (4,)}
    assert sample(logits, [draw(2, **settings)]) == [5]
    assert sample(logits, [draw(3, **settings)]) == [4]


def test_penalties_match_their_definitions() -> None:
    logits = torch.tensor([[2.0, 2.0, -2.0, 1.0]])
    penalised = params(
        temperature=0.0, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5
    )
    history = Draw(penalised, 0, 3, prompt_ids=(0, 2), output_ids=(1, 1, 3))
    untouched = Draw(params(temperature=0.0), 0, 0)
    both = logits.repeat(2, 1)
    apply_penalties(both, [history, untouched])
    # 2/2; 2/2 - .25 - 2 x .5; -2 x 2; 1/2 - .25 - .5
    torch.testing.assert_close(both[0], torch.tensor([1.0, -0.25, -4.0, -0.25]))
    torch.testing.assert_close(both[1:], logits)


def test_logprobs_are_the_models_own() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.7]]))
    draws = [draw(temperature=0.0, top_logprobs=2, logit_bias=((0, 50.0),))]
    (found,) = Sampler((), device=CPU).sample(logits, draws).results()
    assert found.token_id == 0
    assert found.logprob == pytest.approx(math.log(0.1), abs=1e-5)
    assert found.top_ids == (2, 1)
    assert found.top_logprobs == pytest.approx((math.log(0.7), math.log(0.2)), abs=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"min_p": -0.1},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"repetition_penalty": 0.0},
        {"min_tokens": 101},
        {"top_logprobs": 21},
        {"logit_bias": ((1, 101.0),)},
    ],
)
def test_settings_out_of_range_are_refused_by_name(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        params(**changes)
