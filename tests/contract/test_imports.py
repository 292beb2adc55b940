"""The import law: by import-linter's contracts, and by starting the gateway where torch is not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Stands before every finder: an import of a heavy package fails as if it were not installed.
BLOCKER = textwrap.dedent(
    """
    import sys

    BLOCKED = {"torch", "torchvision", "transformers", "safetensors"}

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in BLOCKED:
                raise ImportError(f"{name} is blocked", name=name)

    sys.meta_path.insert(0, Blocker())
    """
)


POLICY = (
    "decoder_svc.embeddings.granting",
    "decoder_svc.embeddings.pages",
    "decoder_svc.embeddings.receiver",
    "decoder_svc.kv_cache.block_pool",
    "decoder_svc.kv_cache.prefix",
    "decoder_svc.scheduler.budget",
    "decoder_svc.scheduler.cohort",
    "decoder_svc.scheduler.decoding",
    "decoder_svc.scheduler.policy",
    "decoder_svc.scheduler.scheduler",
    "encoder_svc.batcher",
    "encoder_svc.store",
    "gateway.routing.decoders",
    "gateway.routing.encoders",
)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKER + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "error::ImportWarning"},
    )


def test_import_linter_keeps_every_contract() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_gateway_module_imports_without_torch() -> None:
    done = run_python(
        "import importlib, pkgutil, gateway\n"
        "names = [m.name for m in pkgutil.walk_packages(gateway.__path__, 'gateway.')]\n"
        "for name in names:\n"
        "    if not name.endswith('__main__'): importlib.import_module(name)\n"
        "print(len(names), *sorted(BLOCKED & set(sys.modules)))\n"
    )
    assert done.returncode == 0, done.stderr
    count, *heavy = done.stdout.split()
    assert int(count) > 10
    assert not heavy


def test_the_gateway_starts_without_torch() -> None:
    """It serves its live check with nothing behind it, then ends in order."""
    code = textwrap.dedent(
        """
        import os, signal, threading, urllib.request
        from chiasm.cli.service import serve
        from chiasm.config import GatewayConfig

        read_fd, write_fd = os.pipe()
        stdout = os.dup(1)
        os.dup2(write_fd, 1)

        def client():
            with os.fdopen(read_fd) as lines:
                ready = next(line for line in lines if line.startswith("chiasm-ready"))
            address = dict(w.split("=") for w in ready.split()[1:])["address"]
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"http://{address}/health", timeout=100) as response:
                os.write(stdout, str(response.status).encode())
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=client, daemon=True).start()
        flags = ["--model=demo", "--port=0", "--drain-s=1"]
        flags += ["--encoder-urls=127.0.0.1:9", "--decoder-urls=127.0.0.1:9"]
        sys.exit(serve(GatewayConfig, "gateway.app:main", flags, {}))
        """
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "200"


def test_policy_knows_no_tensors() -> None:
    """What decides is pure: it can be tested in milliseconds and read without a framework."""
    code = f"import importlib\nfor name in {POLICY!r}: importlib.import_module(name)\n"
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", POLICY)
def test_policy_speaks_no_rpc(name: str) -> None:
    path = (ROOT / name.replace(".", "/")).with_suffix(".py")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if line.startswith(("import grpc", "from grpc"))]
