"""Every kernel of our own under NVIDIA's compute-sanitizer, at small, odd shapes.

    python -m bench.sanitize [--tools memcheck,racecheck,synccheck,initcheck]

Runs itself first as it is, which compiles the kernels, then once under each tool: memory accesses
out of bounds (every tensor is an allocation of its own there), races in shared memory, barriers
used wrongly, memory read before it was written. The exit code is not 0 if anything was found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
_FOUND = 9  # exit code of the tool when it has found something
_PAGE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """A call of a kernel; `run` raises if the result is wrong."""

    name: str
    run: Callable[[], None]


def main() -> int:
    """Prints a line for each kernel and tool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--here", action="store_true", help="only run the kernels")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of each tool")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no GPU here.")
        return 1
    if args.here:
        _run_all()
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not installed: it comes with CUDA's toolkit.")
        return 1
    command = [sys.executable, "-m", "bench.sanitize", "--here"]
    subprocess.run(command, check=True)
    return max([_under(tool, command, args.timeout_s) for tool in args.tools.split(",")])


def _under(tool: str, command: list[str], timeout_s: float) -> int:
    """Runs the command under a tool; prints the tool's summary."""
    started = time.monotonic()
    wrapped = ["compute-sanitizer", "--tool", tool, "--target-processes", "all"]
    wrapped += ["--error-exitcode", str(_FOUND), *command]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    ran = subprocess.run(
        wrapped, env=environment, timeout=timeout_s, capture_output=True, text=True, check=False
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("=========")]
    verdict = lines[-1] if lines else f"no summary, exit code {ran.returncode}"
    seconds = time.monotonic() - started
    print(f"SANITIZER {tool}: {verdict} ({seconds:.0f} s, exit code {ran.returncode})", flush=True)
    if ran.returncode:
        print("\n".join(ran.stdout.splitlines()[:60]), ran.stderr[-2000:], sep="\n")
    return ran.returncode


def _run_all() -> None:
    for case in (*decoder_cases(), *tower_cases()):
        started = time.monotonic()
        case.run()
        torch.cuda.synchronize()
        print(f"{case.name}: right, {time.monotonic() - started:.2f} s", flush=True)


def _rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Drawn on the host, so that few kernels but ours run."""
    return (torch.randn(shape) * scale).to(torch.bfloat16).cuda()


def _check(found: torch.Tensor, wanted: torch.Tensor, limit: float = 1e-2) -> None:
    found, wanted = found.cpu().double(), wanted.cpu().double()
    error = float((found - wanted).norm() / wanted.norm().clamp(min=1e-9))
    assert error < limit, f"off by {error}"


def decoder_cases() -> Iterator[Case]:
    """The kernels of `chiasm.kernels`."""
    for lengths in ([1, 17, 90, 0, 33], [700], list(range(0, 300, 17))):
        for heads, kv_heads, dim in ((14, 2, 128), (8, 8, 64)):
            yield Case(
                f"paged_decode {len(lengths)} x {heads}/{kv_heads} x {dim}",
                lambda shape=(lengths, heads, kv_heads, dim): _decode(*shape),
            )
    for rows in (1, 2, 7, 32):
        for outputs, inputs in ((1000, 1100), (512, 3584), (20000, 256)):
            yield Case(
                f"linear {rows} x {outputs} x {inputs}",
                lambda shape=(rows, outputs, inputs): _linear(*shape),
            )
    for rows in (1, 50, 700):
        for interleaved in (False, True):
            yield Case(
                f"rotate_and_store {rows} {interleaved}",
                lambda shape=(rows, interleaved): _rotate(*shape),
            )
        yield Case(f"norm and gate {rows}", lambda rows=rows: _norm_and_gate(rows))
    for rows, width in ((1, 5001), (9, 5001), (300, 777)):
        yield Case(f"greedy {rows} x {width}", lambda shape=(rows, width): _greedy(*shape))
        yield Case(f"draw {rows} x {width}", lambda shape=(rows, width): _draw(*shape))


def _decode(lengths: list[int], heads: int, kv_heads: int, dim: int) -> None:
    from chiasm.kernels.paged_decode import Lookup, Workspace, paged_decode, paged_decode_reference

    batch, width = len(lengths), -(-max(lengths) // _PAGE)
    keys, values = (_rand(batch * width, kv_heads, _PAGE, dim).transpose(1, 2) for _ in range(2))
    tables = torch.randperm(batch * width).view(batch, width).int()
    lookup = Lookup(
        tables.cuda(), torch.randperm(batch).int().cuda(), torch.tensor(lengths).int().cuda()
    )
    room = Workspace.allocate(batch, heads, dim, keys.device, kv_heads)
    queries = _rand(batch, heads, dim)
    out = torch.zeros_like(queries)
    paged_decode(queries, keys, values, lookup, dim**-0.5, room, out)
    plain = Lookup(lookup.block_tables.cpu(), lookup.seats.cpu(), lookup.lengths.cpu())
    wanted = paged_decode_reference(
        queries.cpu().float(), keys.cpu(), values.cpu(), plain, dim**-0.5
    )
    _check(out, wanted)
    assert not room.arrived.cpu().any(), "counters are not left at zero"


def _linear(rows: int, outputs: int, inputs: int) -> None:
    from chiasm.kernels.gemv import linear

    x, weight, bias = (
        _rand(rows, inputs),
        _rand(outputs, inputs, scale=inputs**-0.5),
        _rand(outputs),
    )
    for _ in range(2):  # the second finds the counters as the first has left them
        out = linear(x, weight, bias)
    _check(out, x.cpu().float() @ weight.cpu().float().t() + bias.cpu().float())


def _rotate(rows: int, interleaved: bool) -> None:
    from chiasm.kernels.rotary import rotate_and_store, rotate_and_store_reference

    heads, kv_heads, dim = 6, 2, 128
    pages = -(-rows // _PAGE) + 2
    qkv, angle = torch.randn(rows, (heads + 2 * kv_heads) * dim), torch.rand(rows, dim // 2)
    slots = torch.randperm(pages * _PAGE)[:rows]
    slots[::7] = -1
    pools = torch.zeros(2, pages, _PAGE, kv_heads, dim, dtype=torch.bfloat16)
    moved = [pool.cuda() for pool in pools]
    wide = pools.float()
    given = qkv.to(torch.bfloat16)
    cos, sin = angle.cos(), angle.sin()
    out = rotate_and_store(given.cuda(), cos.cuda(), sin.cuda(), *moved, slots.cuda(), interleaved)
    _check(out, rotate_and_store_reference(given.float(), cos, sin, *wide, slots, interleaved))
    if rows > 1:
        _check(torch.stack([pool.cpu() for pool in moved]), wide)


def _norm_and_gate(rows: int) -> None:
    from chiasm.kernels.activation import silu_and_mul
    from chiasm.kernels.norm import add_rms_norm

    x, delta, gain = _rand(rows, 1100), _rand(rows, 1100), _rand(1100)
    total, normed = add_rms_norm(x, delta, gain, 1e-6)
    plain = add_rms_norm(x.cpu(), delta.cpu(), gain.cpu(), 1e-6)
    _check(total, plain[0])
    _check(normed, plain[1])
    for width in (770, 5000):
        joined = _rand(rows, 2 * width)
        _check(silu_and_mul(joined), silu_and_mul(joined.cpu().float()))


def _greedy(rows: int, width: int) -> None:
    from chiasm.kernels.argmax import greedy, greedy_reference

    logits, masked = _rand(rows, width), torch.tensor([5, width - 1])
    found = greedy(logits, masked.cuda())
    wanted = greedy_reference(logits.cpu(), masked)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True))


def _draw(rows: int, width: int) -> None:
    from chiasm.kernels.draw import Filters, draw_reference, draw_tokens

    logits, numbers = torch.randn(rows, width), torch.rand(rows).double()
    settings = [(0.8, 5 * (i % 3), 1 - 0.1 * (i % 2), 0.01 * (i % 5)) for i in range(rows)]
    table = torch.tensor(settings, dtype=torch.float64).t().contiguous()
    found = draw_tokens(logits.cuda(), Filters(*table.cuda()), numbers.cuda())
    wanted = draw_reference(logits, Filters(*table), numbers)
    assert (found.cpu() == wanted).double().mean() > 0.7, "other ids are drawn"


def tower_cases() -> Iterator[Case]:
    """The kernels of the encoder's tower."""
    for lengths in ([64, 64, 32, 8, 4], [128, 100], [300, 131, 64, 1]):
        for head_dim in (80, 64):
            yield Case(
                f"tower attention {lengths} x {head_dim}",
                lambda shape=(lengths, head_dim): _tower_attention(*shape),
            )


def _tower_attention(lengths: list[int], head_dim: int) -> None:
    from encoder_svc.layers.attention.base import Segments
    from encoder_svc.layers.attention.fused import FusedAttention
    from encoder_svc.layers.attention.reference import ReferenceAttention
    from encoder_svc.layers.rotary import Angles

    tokens, cpu = sum(lengths), torch.device("cpu")
    qkv, turns = _rand(tokens, 3, 2, head_dim), torch.randn(tokens, head_dim // 2)
    cos, sin = turns.cos(), turns.sin()
    found = FusedAttention()(
        qkv, Angles(cos.cuda(), sin.cuda()), Segments.from_lengths(lengths, qkv.device)
    )
    segments = Segments.from_lengths(lengths, cpu)
    _check(found, ReferenceAttention()(qkv.cpu().float(), Angles(cos, sin), segments))


if __name__ == "__main__":
    sys.exit(main())
