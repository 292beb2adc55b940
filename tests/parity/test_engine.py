"""However a request is cut, batched, cached or preempted, its greedy tokens stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chiasm.plan import Grid, Modality
from decoder_svc.config import read_text_config
from decoder_svc.engine.messages import PartFailed, RedirectPart, Tokens
from tests.checkpoints import save_tiny_qwen
from tests.unit.decoder.rig import SOURCE, Medium, Outcome, Rig, make_request

torch.set_num_threads(1)

HIDDEN = 64


@pytest.fixture(scope="module", name="model")
def model_(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen(tmp_path_factory.mktemp("tiny"))


def medium(name: str, grid: Grid, *, clip: bool = False) -> Medium:
    count = grid.t * grid.h * grid.w // 4
    rows = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(sum(name.encode())))
    if clip:
        return Medium(grid, rows, Modality.VIDEO, 1.0, name)
    return Medium(grid, rows, name=name)


PICTURE = medium("p", Grid(1, 8, 10))  # 20 rows
RED, BLUE = medium("r", Grid(1, 8, 8)), medium("b", Grid(1, 8, 8))


def mixed(index: int) -> list[int | Medium]:
    """Text, one picture, two pictures, or a clip, each with its own numbers."""
    text = [40 + index, 60 + index, 80 + index]
    match index % 4:
        case 0:
            return text * 7
        case 1:
            return [*text, medium(chr(65 + index), Grid(1, 6, 4 + index % 3 * 2)), *text]
        case 2:
            first, second = medium(f"{index}x", Grid(1, 4, 6)), medium(f"{index}y", Grid(1, 6, 6))
            return [*text, first, 50, second, *text]
        case _:
            return [*text, medium(f"{index}v", Grid(3, 4, 6), clip=True), *text * 2]


def submit(rig: Rig, request_id: str, prompt: list[int | Medium], **sampling: object) -> None:
    rig.put(make_request(rig.text, request_id, prompt=prompt, encoder=rig.encoder, **sampling))  # type: ignore[arg-type]


def alone(model: Path, prompt: list[int | Medium], **sampling: object) -> list[int]:
    rig = Rig(model, prefix=False)
    return rig.generate(prompt=prompt, encoder=rig.encoder, **sampling).tokens()


def test_a_chunk_may_end_at_any_row_of_a_picture(model: Path) -> None:
    for before in (1, 3):
        prompt = [*range(40, 40 + before), PICTURE, *range(60, 70)]
        expected = alone(model, prompt, max_tokens=12)
        for size in range(1, before + len(PICTURE.rows) + 2):
            rig = Rig(model, chunk_tokens=size, block_size=4, segment_rows=6)
            got = rig.generate(prompt=prompt, encoder=rig.encoder, max_tokens=12).tokens()
            assert got == expected, f"chunks of {size} tokens, {before} before the picture"


def test_a_picture_of_several_parts_and_segments(model: Path) -> None:
    prompt = [40, PICTURE, 60]
    rig = Rig(model, segment_rows=3)
    got = rig.generate(prompt=prompt, encoder=rig.encoder, part_rows=7)
    assert got.tokens() == alone(model, prompt)
    assert rig.encoder.num_opened == 3


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_prefix_cache_changes_nothing_but_the_work(model: Path, block_size: int) -> None:
    rig = Rig(model, block_size=block_size, num_blocks=512)
    prompt = [*range(40, 60), PICTURE, *range(60, 64)]
    first = rig.generate("a", prompt=prompt, encoder=rig.encoder, max_tokens=24)
    sent = rig.encoder.rows_sent
    second = rig.generate("b", prompt=prompt, encoder=rig.encoder, max_tokens=24)
    assert first.tokens() == second.tokens() == alone(model, prompt, max_tokens=24)
    length = 20 + len(PICTURE.rows) + 4
    assert first.done.cached_tokens == 0
    assert second.done.cached_tokens == (length - 1) // block_size * block_size
    if second.done.cached_tokens >= 40:  # the picture's last row is at 39
        assert rig.encoder.rows_sent == sent


def test_prefix_hit_may_end_inside_a_picture(model: Path) -> None:
    for after in range(1, 6):
        rig = Rig(model, block_size=8)
        rig.generate("a", prompt=[*range(40, 45), PICTURE, 60], encoder=rig.encoder)
        prompt = [*range(40, 45), PICTURE, *range(70, 70 + after)]
        got = rig.generate("b", prompt=prompt, encoder=rig.encoder)
        assert got.done.cached_tokens == 24
        assert got.tokens() == alone(model, prompt)


def test_equal_placeholders_of_other_pictures_share_nothing(model: Path) -> None:
    rig = Rig(model, block_size=4)
    answers = [
        rig.generate(str(i), prompt=[40, 41, one, 60], encoder=rig.encoder, max_tokens=16)
        for i, one in enumerate((RED, BLUE, RED))
    ]
    assert (
        answers[0].tokens() == answers[2].tokens() == alone(model, [40, 41, RED, 60], max_tokens=16)
    )
    assert answers[1].tokens() == alone(model, [40, 41, BLUE, 60], max_tokens=16)
    assert answers[1].tokens() != answers[0].tokens()
    assert answers[1].done.cached_tokens == 0
    swapped = [
        rig.generate(f"s{i}", prompt=[40, a, 50, b, 60], encoder=rig.encoder, max_tokens=16)
        for i, (a, b) in enumerate(((RED, BLUE), (BLUE, RED)))
    ]
    assert swapped[0].tokens() == alone(model, [40, RED, 50, BLUE, 60], max_tokens=16)
    assert swapped[1].tokens() == alone(model, [40, BLUE, 50, RED, 60], max_tokens=16)


@pytest.mark.parametrize("ahead", [False, True])
def test_sixteen_mixed_requests_at_once_equal_serial(model: Path, ahead: bool) -> None:
    rig = Rig(model, chunk_tokens=40, segment_rows=5, ahead=ahead)
    for index in range(16):
        submit(rig, str(index), mixed(index), max_tokens=20)
        if index % 3 == 0:
            rig.step()
    rig.run(*map(str, range(16)))
    for index in range(16):
        assert rig.outcomes[str(index)].tokens() == alone(model, mixed(index), max_tokens=20), index


@pytest.mark.parametrize("ahead", [False, True])
def test_preemption_changes_no_token(model: Path, ahead: bool) -> None:
    rig = Rig(model, num_blocks=24, block_size=4, chunk_tokens=16, segment_rows=8, ahead=ahead)
    watcher = Reencoder(rig)
    for index in range(8):
        submit(rig, str(index), mixed(index), max_tokens=30)
    watcher.run([str(i) for i in range(8)])
    assert rig.metrics.preemptions._value.get() > 0
    for index in range(8):
        assert rig.outcomes[str(index)].tokens() == alone(model, mixed(index), max_tokens=30), index


class Reencoder:
    """Plays the gateway: a lost part is promised again by another encode."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.num_redirects = 0
        self._seen: dict[str, int] = {}

    def run(self, names: list[str], most: int = 3000) -> None:
        for _ in range(most):
            if all(self.rig.outcomes.get(name, Outcome()).over for name in names):
                return
            self.rig.step()
            self.redirect()
        raise AssertionError("not over")

    def redirect(self) -> None:
        for name, outcome in self.rig.outcomes.items():
            events = outcome.events[self._seen.get(name, 0) :]
            self._seen[name] = len(outcome.events)
            for event in events:
                if isinstance(event, PartFailed):
                    self.num_redirects += 1
                    move = RedirectPart(name, event.item, event.part, event.attempt + 1, SOURCE)
                    self.rig.put(move)


def test_preempted_choices_fetch_their_rows_again(model: Path) -> None:
    # Without a prefix cache a preempted request has to see its picture again.
    rig = Rig(model, num_blocks=20, block_size=4, prefix=False)
    watcher = Reencoder(rig)
    prompts = [[40 + i, medium(str(i), Grid(1, 6, 6)), 60] for i in range(4)]
    for i, prompt in enumerate(prompts):
        submit(rig, str(i), prompt, max_tokens=40)
    watcher.run([str(i) for i in range(4)])
    assert watcher.num_redirects > 0
    for i, prompt in enumerate(prompts):
        assert rig.outcomes[str(i)].tokens() == alone(model, prompt, max_tokens=40)


@pytest.mark.parametrize("prefix", [True, False])
def test_choices_share_the_prompt_and_differ(model: Path, prefix: bool) -> None:
    rig = Rig(model, block_size=4, prefix=prefix)
    prompt = [*range(40, 50), PICTURE, *range(60, 66)]
    outcome = rig.generate(
        prompt=prompt, encoder=rig.encoder, n=4, temperature=1.0, seed=5, max_tokens=16
    )
    answers = [outcome.tokens(choice) for choice in range(4)]
    assert len({tuple(answer) for answer in answers}) == 4
    assert set(outcome.finished) == {0, 1, 2, 3}
    assert rig.encoder.rows_sent == len(PICTURE.rows)
    assert outcome.done.completion_tokens == sum(map(len, answers))
    fewer = Rig(model)
    pair = fewer.generate(
        prompt=prompt, encoder=fewer.encoder, n=2, temperature=1.0, seed=5, max_tokens=16
    )
    assert [pair.tokens(0), pair.tokens(1)] == answers[:2]


def test_replay_goes_on_where_it_was_cut(model: Path) -> None:
    text = read_text_config(model)
    prompt = [*range(40, 50), PICTURE, 60]
    settings = {"temperature": 0.9, "seed": 11, "max_tokens": 24, "frequency_penalty": 0.5}
    rig = Rig(model)
    whole = rig.generate("a", prompt=prompt, encoder=rig.encoder, **settings).tokens()
    for cut in (1, 10, 23):
        again = Rig(model)
        again.put(
            make_request(
                text,
                "b",
                prompt=prompt,
                encoder=again.encoder,
                resume=(tuple(whole[:cut]),),
                **settings,
            )
        )
        told = [event for event in again.run("b").events if isinstance(event, Tokens)]
        assert told[0].position == cut
        assert [token for event in told for token in event.token_ids] == whole[cut:]
        assert again.outcomes["b"].done.completion_tokens == len(whole)


def test_seeded_draws_ignore_their_neighbours(model: Path) -> None:
    settings = {"temperature": 1.0, "max_tokens": 20, "top_p": 0.9, "top_k": 50}
    lone = Rig(model).generate(prompt=[40, 41, 42], seed=42, **settings).tokens()
    crowd = Rig(model)
    submit(crowd, "seeded", [40, 41, 42], seed=42, **settings)
    for i in range(7):
        submit(crowd, str(i), [50 + i], seed=i, temperature=0.7, max_tokens=5 + 3 * i)
    assert crowd.run("seeded").tokens() == lone
