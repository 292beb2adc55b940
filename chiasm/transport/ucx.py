"""What UCX, which NIXL moves rows with, has to be told on this machine.

UCX reads its settings from the environment when it is loaded, so they are made there, and only
those that are not set already: who runs a cluster knows its network better.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

_TCP = "tcp"
_ALL = "all"


def ucx_settings(*, gpus: bool) -> dict[str, str]:
    """The variables to set.

    Args:
        gpus: Whether this machine has NVIDIA GPUs.
    """
    settings = {"UCX_LOG_LEVEL": "fatal"}  # it prints on stdout; a dead peer is in our own log
    if gpus:
        # Without it a READ from a peer on the same GPU runs at 0.6 GB/s instead of 300. Rows are
        # pushed by WRITE, so that it matters to whoever shares the process only.
        settings["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"
    return settings


def apply_ucx_settings(environment: MutableMapping[str, str]) -> None:
    """Sets what is not set. Call it before NIXL is loaded."""
    for name, value in ucx_settings(gpus=_has_gpus()).items():
        environment.setdefault(name, value)
    tls = environment.get("UCX_TLS", _ALL)
    if not has_tcp(tls):
        environment["UCX_TLS"] = _with_tcp(tls)


def has_tcp(tls: str) -> bool:
    """Whether UCX_TLS leaves TCP in: without it agents find no way to set up their connections.

    Shared memory cannot tell that a peer has died, so NIXL refuses to use it for that.
    """
    names = [name.strip() for name in tls.lstrip("^").split(",")]
    if tls.startswith("^"):
        return _TCP not in names
    return _TCP in names or _ALL in names or not tls


def _with_tcp(tls: str) -> str:
    if not tls.startswith("^"):
        return f"{tls},{_TCP}"
    others = [name for name in tls[1:].split(",") if name.strip() != _TCP]
    return f"^{','.join(others)}" if others else _ALL


def _has_gpus() -> bool:
    """Whether the kernel shows NVIDIA GPUs; CUDA is not asked."""
    return any(Path("/dev").glob("nvidia[0-9]*"))
