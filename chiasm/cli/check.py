"""`chiasm check`: what this machine can do, and what a checkpoint holds.

Imports nothing heavy into this process: torch and nixl are tried in processes of their own, since
either may crash on a machine whose driver does not fit.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chiasm.checkpoint import resolve_model, weight_files
from chiasm.cli.model_facts import Ranks, Traffic, describe
from chiasm.tokenizer_file import tokenizer_files
from chiasm.transport.ucx import apply_ucx_settings, has_tcp

GIB = 1 << 30
_PIXELS = "preprocessor_config.json"

_PROBE_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "gpus": gpus, "threads": torch.get_num_threads()}))
"""
_PROBE_NIXL = """
import sys
try:
    from nixl_cu13._api import nixl_agent, nixl_agent_config
except ImportError:
    try:
        from nixl_cu12._api import nixl_agent, nixl_agent_config
    except ModuleNotFoundError:
        sys.exit("not installed")
nixl_agent("check", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
print('{"ok": true}')
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `needed` findings that are not `good` make the command fail."""

    what: str
    found: str
    good: bool
    needed: bool = False


def run_check(model: str | None, traffic: Traffic, ranks: Ranks) -> int:
    """Prints the report.

    Args:
        model: A checkpoint to look at as well.
        traffic: What it is to serve, and on what.
        ranks: Ranks to reckon with.

    Returns:
        0 when everything that is needed is there, else 1.
    """
    findings = [*_machine(), *(_checkpoint(model, traffic, ranks) if model else ())]
    table = Table(show_header=False, box=None, padding=(0, 1))
    for finding in findings:
        mark = ("✓", "green") if finding.good else ("✗", "red") if finding.needed else ("-", "dim")
        table.add_row(Text(*mark), finding.what, Text(finding.found))
    Console().print(table)
    return 1 if any(f.needed and not f.good for f in findings) else 0


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    yield Finding(
        "python", f"{platform.python_version()}, {platform.machine()}, {cores} cores", True
    )
    for package in ("grpcio", "protobuf"):
        yield _package(package, needed=True)
    for package in ("tokenizers", "av", "kubernetes", "flashinfer-python"):
        yield _package(package, needed=False)
    torch = _probe(_PROBE_TORCH)
    if "error" in torch:
        yield Finding("torch", f"{torch['error']} (encoder and decoder need it)", False)
    else:
        yield Finding("torch", f"{torch['version']}, {torch['threads']} threads", True)
        gpus = torch["gpus"]
        yield Finding("GPUs", ", ".join(gpus) or "none: --device auto runs on cpu", bool(gpus))
    nixl = _probe(_PROBE_NIXL)
    found = nixl.get("error", "agent with UCX starts")
    yield Finding("nixl", str(found), "error" not in nixl)
    yield _ucx()
    rdma = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    yield Finding("RDMA devices", ", ".join(rdma) or "none: rows travel over TCP", bool(rdma))
    yield _shared_memory()


def _ucx() -> Finding:
    """What UCX is told: by whoever set up this machine, and by chiasm (docs/transport.md)."""
    environment = dict(os.environ)
    given = environment.get("UCX_TLS", "all")
    apply_ucx_settings(environment)
    ours = sorted(item for item in environment.items() if item[0].startswith("UCX_"))
    found = ", ".join(f"{name}={value}" for name, value in ours)
    if not has_tcp(given):
        return Finding("UCX", f"{found} (tcp was added: agents need it)", False)
    return Finding("UCX", found, True)


def _package(name: str, *, needed: bool) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name), True, needed)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "not installed", False, needed)


def _shared_memory() -> Finding:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Finding("/dev/shm", f"{error.strerror}", False, needed=True)
    text = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    enough = usage.free >= GIB // 2
    hint = "" if enough else "; the decoder's slab of rows lives there (--slab-bytes)"
    return Finding("/dev/shm", text + hint, enough, needed=True)


def _probe(code: str) -> dict[str, Any]:
    """Runs code that prints one JSON object; `error` says in one line why it did not."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": "does not answer"}
    if done.returncode == 0:
        result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return result
    lines = done.stderr.strip().splitlines()
    return {"error": lines[-1] if lines else f"exit code {done.returncode}"}


def _checkpoint(model: str, traffic: Traffic, ranks: Ranks) -> Iterator[Finding]:
    try:
        directory = resolve_model(model)
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        yield Finding("model", str(error), False, needed=True)
        return
    yield Finding("model", f"{config.get('model_type', 'unknown')} in {directory}", True)
    tokenizer = tokenizer_files(directory)
    names = ", ".join(path.name for path in tokenizer)
    yield Finding("tokenizer", names or "missing", bool(tokenizer), needed=True)
    there = (directory / _PIXELS).is_file()
    needed = "llm_config" not in config  # InternVL's authors have it all in config.json
    yield Finding(_PIXELS, "there" if there else "missing", there or not needed, needed=needed)
    weights = _weights(directory)
    yield weights
    if weights.good:
        try:
            for what, found in describe(directory, traffic, ranks):
                yield Finding(what, found, True)
        except (KeyError, ValueError) as error:
            yield Finding("sizes", f"{type(error).__name__}: {error}", False)


def _weights(directory: Path) -> Finding:
    try:
        files = weight_files(directory)
    except ValueError as error:
        return Finding("weights", str(error), False, needed=True)
    total = sum(path.stat().st_size for path in files)
    return Finding("weights", f"{total / GIB:.2f} GiB in {len(files)} files", True)
