"""The demo model on unseen seeds, asked through a decoder of two stages by two shards.

The full table (200 questions a task) is made by `python -m tools.demo_model.evaluate`; here are
fewer questions, each compared with the answer of transformers where that is quick to have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from chiasm.demo import checkpoint_dir
from tests.integration.stack import Stack
from tools.demo_model.answer import Checkpoint, Endpoint
from tools.demo_model.evaluate import score
from tools.demo_model.questions import TASKS, question

COUNT = 24
COMPARED = 2
BAR = 0.97  # of all questions together; one mistake in a task of so few is below it


@pytest.fixture(scope="module", name="endpoint")
def endpoint_() -> Iterator[Endpoint]:
    stack = Stack("demo")
    try:
        encoder = stack.start("encoder_svc")
        decoder = stack.start("decoder_svc", "--tp-size", "2", "--pp-size", "2")
        urls = ["--encoder-urls", encoder.wait_ready().address]
        urls += ["--decoder-urls", decoder.wait_ready().address]
        gateway = stack.start("gateway", *urls).wait_in_use()
        with closing(Endpoint(f"http://{gateway.address}")) as found:
            yield found
    finally:
        stack.stop()


@pytest.mark.timeout(900)
def test_unseen_questions_of_every_task(endpoint: Endpoint) -> None:
    scores = [score(endpoint, task, count=COUNT, clients=16) for task in TASKS]
    mistakes = [f"{one.task}: {mistake}" for one in scores for mistake in one.mistakes]
    assert sum(one.failed for one in scores) == 0
    assert all(one.right >= COUNT - 1 for one in scores), mistakes
    assert sum(one.right for one in scores) >= BAR * COUNT * len(TASKS), mistakes


@pytest.mark.timeout(900)
def test_answers_are_those_of_transformers(endpoint: Endpoint) -> None:
    torch.set_num_threads(1)
    reference = Checkpoint(checkpoint_dir())
    for task in TASKS:
        for index in range(1000, 1000 + COMPARED):
            messages = question(task, index).messages
            assert endpoint.answer(messages) == reference.answer(messages), (task, index)
