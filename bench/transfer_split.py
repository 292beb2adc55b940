"""Where the time of a picture's rows goes until they are usable: `python -m bench.transfer_split`.

Two processes note when each step begins, on the clock that all processes of a machine share.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from bench.transfer import PICTURE, hear, process, routes
from bench.transfer_ends import ROW, Ends, run_decoder, run_encoder

STEPS = (
    ("ready", "told", "the tower's thread to the encoder's loop"),
    ("told", "asked", "session and stream"),
    ("asked", "posted", "the encoder's loop to the agent's thread"),
    ("posted", "begun", "descriptors, a handle"),
    ("begun", "written", "the write, its end seen"),
    ("written", "heard", "the notification"),
    ("heard", "arrived", "the agent's thread to the decoder's loop"),
    ("arrived", "usable", "the loop to the engine's thread, the receiver's turn"),
)


def main() -> None:
    """Prints one table for each pair of memories."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--bytes", type=int, default=PICTURE)
    args = parser.parse_args()
    for source, target in routes():
        ends = Ends("nixl", source, target, marks=True)
        with process(run_encoder, ends) as encoder:
            where = hear(encoder)
            work = [(-(-args.bytes // ROW), args.repeats)]
            with process(run_decoder, ends, where, work) as decoder:
                seconds = hear(decoder)
                times = hear(decoder)
            encoder.send(None)
            times |= hear(encoder)
        print(f"\n{source} to {target}, {args.bytes} bytes, {args.repeats} times, ms\n")
        print("| step | median | 10th percentile |\n|---|---|---|")
        for begin, end, words in STEPS:
            gaps = [b - a for a, b in zip(times[begin], times[end], strict=True)][1:]
            print(line(words, gaps))
        print(line("together", seconds), flush=True)


def line(words: str, seconds: Sequence[float]) -> str:
    """On a machine with other work the 10th percentile says what the step itself costs."""
    tenth = sorted(seconds)[len(seconds) // 10]
    return f"| {words} | {statistics.median(seconds) * 1e3:.3f} | {tenth * 1e3:.3f} |"


if __name__ == "__main__":
    main()
