"""Between the engine's values and the messages of Generate; translates, decides nothing."""

from __future__ import annotations

from chiasm.errors import InvalidRequest
from chiasm.plan import Source
from chiasm.v1 import decoder_pb2
from decoder_svc.engine.messages import (
    ChoiceDone,
    Command,
    Event,
    ItemReleased,
    PartFailed,
    RedirectPart,
    RequestDone,
    RequestFailed,
    StopChoice,
    Tokens,
)


def to_command(request_id: str, message: decoder_pb2.GenerateRequest) -> Command:
    """The command of a message that follows the first. Raises InvalidRequest for a second start."""
    kind = message.WhichOneof("kind")
    if kind == "stop_choice":
        return StopChoice(request_id, message.stop_choice.choice)
    if kind not in ("redirect", "add_source"):
        raise InvalidRequest(f"{kind or 'an empty message'} after start", param="kind")
    move = message.redirect if kind == "redirect" else message.add_source
    source = Source.from_proto(move.source)
    return RedirectPart(
        request_id, move.item, move.part, move.attempt, source, kind == "add_source"
    )


def to_response(event: Event) -> decoder_pb2.GenerateResponse:
    """The message of an event. Raises the error of a failed request."""
    match event:
        case Tokens():
            return decoder_pb2.GenerateResponse(tokens=_tokens(event))
        case ItemReleased(item, cached):
            landed = decoder_pb2.Landed(item=item, from_prefix_cache=cached)
            return decoder_pb2.GenerateResponse(landed=landed)
        case PartFailed(item, part, attempt, cause, message):
            lost = decoder_pb2.EmbeddingLost(
                item=item, part=part, attempt=attempt, cause=cause.to_proto(), message=message
            )
            return decoder_pb2.GenerateResponse(embedding_lost=lost)
        case ChoiceDone(choice, reason, stop_token_id):
            finished = decoder_pb2.ChoiceFinished(
                choice=choice,
                reason=f"FINISH_REASON_{reason.name}",
                stop_token_id=stop_token_id,
            )
            return decoder_pb2.GenerateResponse(finished=finished)
        case RequestDone():
            return decoder_pb2.GenerateResponse(done=_done(event))
        case RequestFailed(error):
            raise error


class TokenWriter:
    """Serializes answers of one new token each; most answers are such, so it fills in one form."""

    def __init__(self) -> None:
        self._response = decoder_pb2.GenerateResponse(tokens=decoder_pb2.TokenDelta())
        self._delta = self._response.tokens

    def write(self, choice: int, position: int, token_id: int) -> bytes:
        """As `to_response` has it, serialized."""
        delta = self._delta
        delta.choice = choice
        delta.position = position
        delta.token_ids[:] = (token_id,)
        return self._response.SerializeToString()


def _tokens(event: Tokens) -> decoder_pb2.TokenDelta:
    logprobs = [
        decoder_pb2.TokenLogprobs(
            logprob=sampled.logprob, top_ids=sampled.top_ids, top_logprobs=sampled.top_logprobs
        )
        for sampled in event.sampled
    ]
    return decoder_pb2.TokenDelta(
        choice=event.choice,
        position=event.position,
        token_ids=event.token_ids,
        logprobs=logprobs,
    )


def _done(event: RequestDone) -> decoder_pb2.GenerateDone:
    return decoder_pb2.GenerateDone(
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        completion_tokens=event.completion_tokens,
        queue_ms=event.queue_ms,
        transfer_ms=event.transfer_ms,
        prefill_ms=event.prefill_ms,
        decode_ms=event.decode_ms,
    )
