"""What the engine has to say and has not sent yet."""

from __future__ import annotations

from collections.abc import Sequence

from decoder_svc.embeddings.events import FetchCommand
from decoder_svc.engine.mailbox import Mailbox
from decoder_svc.engine.messages import EngineLoad, Event, StepEvents, StepTokens


class Outgoing:
    """Collects what is said of requests in a turn, to send it at once.

    Args:
        mailbox: Takes it away.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._tokens: list[StepTokens] = []
        self._events: list[tuple[str, Event]] = []

    def say(self, request_id: str, event: Event) -> None:
        """Something about a request."""
        self._events.append((request_id, event))

    def say_tokens(self, tokens: Sequence[StepTokens]) -> None:
        """What many choices drew. They go before all other events of the turn."""
        self._tokens += tokens

    def send(self, commands: Sequence[FetchCommand], load: EngineLoad) -> None:
        """Sends it, with transfer commands and the load."""
        events = StepEvents(tuple(self._tokens), tuple(self._events))
        self._tokens, self._events = [], []
        self._mailbox.send(events, commands, load)
