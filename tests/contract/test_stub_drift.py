"""The committed stubs are what the pinned tools make of proto/ today."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUBS = ROOT / "chiasm" / "v1"
PINNED = re.search(r"^GRPC_TOOLS := grpcio-tools==(\S+)$", (ROOT / "Makefile").read_text(), re.M)


def tools_python() -> Path:
    """The environment `make proto-tools` makes; `make test` does it before the tests."""
    python = Path(os.environ.get("PROTO_VENV", ROOT / ".venv-proto")) / "bin" / "python"
    assert python.exists(), f"{python} is missing: make proto-tools"
    return python


def test_the_tools_are_the_pinned_ones() -> None:
    assert PINNED is not None
    code = "import importlib.metadata as m; print(m.version('grpcio-tools'))"
    done = subprocess.run([tools_python(), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == PINNED[1]


def test_stubs_equal_what_the_protos_generate(tmp_path: Path) -> None:
    protos = sorted(
        str(p.relative_to(ROOT / "proto")) for p in ROOT.glob("proto/chiasm/v1/*.proto")
    )
    assert protos
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [str(tools_python()), "-m", "grpc_tools.protoc", "-I", "proto", *outputs, *protos]
    subprocess.run(command, cwd=ROOT, check=True, timeout=250)
    generated = {path.name: path.read_text() for path in (tmp_path / "chiasm" / "v1").iterdir()}
    del generated["common_pb2_grpc.py"]  # common.proto has no service
    committed = {path.name: path.read_text() for path in STUBS.glob("*_pb2*.py*")}
    assert sorted(generated) == sorted(committed)
    differing = [name for name, text in generated.items() if committed[name] != text]
    assert not differing, "run make proto"
