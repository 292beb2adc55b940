"""What a request wants of sampling, as a frozen value that crosses to the last stage. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Checked settings; None and 0 have become their meanings already."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the answer: the checkpoint's, unless ignored, and the request's own."""
    n: int = 1
    top_logprobs: int | None = None
    """None = no logprobs wanted."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    """What the answer must look like, as `grammar.source_of` made it; empty = anything."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 2.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", 1e-3, 1e3),
        ):
            value = getattr(self, name)
            if not low <= value <= high:  # also refuses NaN
                raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {value:g}")
        if self.top_p == 0:
            raise ValueError("top_p must be above 0")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens must be in [0, max_tokens = {self.max_tokens}], got {self.min_tokens}"
            )
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= 20:
            raise ValueError(f"top_logprobs must be in [0, 20], got {self.top_logprobs}")
        for token, bias in self.logit_bias:
            if not -100.0 <= bias <= 100.0:
                raise ValueError(f"logit_bias of {token} must be in [-100, 100], got {bias:g}")

    @property
    def is_plain(self) -> bool:
        """Whether the token is simply the likeliest of those that may be drawn."""
        return not (
            self.temperature
            or self.needs_history
            or self.logit_bias
            or self.grammar
            or self.min_tokens
            or self.top_logprobs is not None
        )

    @property
    def needs_history(self) -> bool:
        """Whether a draw depends on the tokens so far."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @property
    def needs_host_state(self) -> bool:
        """Whether a draw needs every earlier token on the CPU before it can be made."""
        return self.needs_history or bool(self.grammar)


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be sampled: everything the choice depends on besides the logits."""

    params: SamplingParams
    choice: int
    position: int
    """Index in the choice's output; with seed and choice it fixes the random number."""
    prompt_ids: tuple[int, ...] = ()
    """Filled only where penalties need them."""
    output_ids: tuple[int, ...] = ()
    """Filled where penalties or a grammar need them."""


NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Sampled:
    """The outcome of one draw."""

    token_id: int
    """NO_TOKEN: the grammar cannot go on."""
    finite: bool = True
    """False: the logits held a NaN or an infinity and the token means nothing."""
    logprob: float | None = None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
