"""`python -m decoder_svc.sampling.grammar_trial`: compiles grammars where they can do no harm.

A grammar may take the library's recursion through the end of the stack, or run for ever. Here that
ends this process alone: it has little stack, little memory and little time for each grammar. It
reads lengths and texts on stdin, and says one line of JSON for each: null, or what is wrong.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from collections.abc import Callable

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

CPU_S = 0.5
"""For one grammar; real vocabularies take about as long again."""
_STACK_BYTES = 1 << 20  # less than any thread has that compiles what has passed here
_MEMORY_BYTES = 2 << 30  # of address space
_HEADER = 4
_NUM_BYTES = 256


class _Bytes:
    """A vocabulary of all bytes and then special tokens: quick to build, and says the same."""

    bos_token_id = None

    def __init__(self, vocab_size: int) -> None:
        names = range(_NUM_BYTES, vocab_size)
        self.eos_token_id = vocab_size - 1
        self.tokens = [bytes((i,)) for i in range(_NUM_BYTES)] + [b"\xff<%d>" % i for i in names]
        self.special_token_ids = list(names)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def main() -> None:
    """Until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wrapper = TokenizerWrapper(_Bytes(max(int(sys.argv[1]), _NUM_BYTES + 1)))
    tokenizer = LLTokenizer(wrapper, n_vocab=len(wrapper.tokens))
    threading.stack_size(_STACK_BYTES)
    while header := sys.stdin.buffer.read(_HEADER):
        source = sys.stdin.buffer.read(int.from_bytes(header, "big")).decode()
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)  # ends the process: nobody catches it
        error = _in_thread(lambda: trial(tokenizer, source))  # noqa: B023, called at once
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        print(json.dumps(error), flush=True)


def trial(tokenizer: LLTokenizer, source: str) -> str | None:
    """What is wrong with a grammar; also takes its first step."""
    matcher = LLMatcher(tokenizer, source, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():
        return None
    return matcher.get_error().partition("\n")[0][:300] or "it cannot be compiled"


def _in_thread(work: Callable[[], str | None]) -> str | None:
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0] if found else "it cannot be compiled"


if __name__ == "__main__":
    main()
