"""`python -m tests.fuzz --inputs 20000`: see `campaign`. Exit code 1: something was found."""

from __future__ import annotations

import argparse
import asyncio
import sys

from tests.fuzz.campaign import Campaign, Findings, target


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    async def run() -> Findings:
        async with target() as at:
            say = lambda line: print(line, flush=True)  # noqa: E731
            return await Campaign(at, seed=args.seed, inputs=args.inputs, say=say).run()

    found = asyncio.run(run())
    for failure in found.failures[:20]:
        print(failure)
    try:
        found.check()
    except AssertionError as error:
        sys.exit(str(error))
    print(f"{args.inputs} inputs, {found.goods} good requests, {found.seconds:.0f} s: all well")


if __name__ == "__main__":
    main()
