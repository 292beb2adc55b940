"""Each service's extra names what its code imports, and nothing else; versions are pinned once."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OURS = {"chiasm", "gateway", "encoder_svc", "decoder_svc"}
EXTRAS = {
    "chiasm": (),
    "gateway": ("gateway", "kubernetes"),
    "encoder_svc": ("encoder",),
    "decoder_svc": ("decoder",),
}
# Where the import's name is not the distribution's.
DISTRIBUTION = {
    "PIL": "pillow",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "huggingface_hub": "huggingface-hub",
    "prometheus_client": "prometheus-client",
    "yaml": "pyyaml",
}
# Imported by the kernel only where a service that has it needs it, or only if it is there.
OPTIONAL = {"huggingface_hub", "numpy", "prometheus_client", "safetensors", "torch"}
OPTIONAL |= {"nixl_cu12", "nixl_cu13"}
# Only where there is a GPU: triton comes with torch's builds for CUDA, flashinfer is an extra.
WITH_GPU = {"triton", "flashinfer"}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~ ]", requirement)[0].lower() for requirement in requirements}


def imported(package: str) -> set[str]:
    found: set[str] = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - OURS - {"__future__"}


@pytest.mark.parametrize("package", EXTRAS)
def test_what_is_imported_is_declared(package: str) -> None:
    declared = names(PROJECT["dependencies"])
    for extra in EXTRAS[package]:
        declared |= names(PROJECT["optional-dependencies"][extra])
    used = imported(package) - WITH_GPU
    if package == "chiasm":
        used -= OPTIONAL
    missing = {DISTRIBUTION.get(name, name).lower() for name in used} - declared
    assert not missing


@pytest.mark.parametrize("package", [name for name in EXTRAS if name != "chiasm"])
def test_what_is_declared_is_imported(package: str) -> None:
    used = {DISTRIBUTION.get(n, n).lower() for n in imported(package) | imported("chiasm")}
    idle = names(PROJECT["optional-dependencies"][EXTRAS[package][0]]) - used
    assert not idle


def test_every_direct_dependency_is_pinned_once() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==")[0] for line in lines if "==" in line and not line.startswith("#")]
    assert len(pins) == len(set(pins))
    extras = PROJECT["optional-dependencies"]
    needed = names(PROJECT["dependencies"])
    for extra, requirements in extras.items():
        needed |= names(requirements) if extra != "flashinfer" else set()
    missing = needed - {pin.lower() for pin in pins} - {"chiasm"}
    assert not missing
