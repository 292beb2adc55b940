"""The images' steps still work, and what they install runs as the images say."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.images.dockerfile import Stage, read
from tests.images.replay import ROOT, UID, Image, sandbox_trouble
from tests.integration.cluster import PATIENCE_S, free_port
from tests.kube.control_plane import until

ROLES = ("gateway", "encoder", "decoder")
FLAGS = {"gateway": ("--decoder-urls", "127.0.0.1:1"), "encoder": (), "decoder": ()}
# What the images of torch may bring is none of the gateway's.
UNWANTED = {"gateway": {"torch", "transformers", "safetensors"}, "encoder": set(), "decoder": set()}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def stages(role: str) -> list[Stage]:
    return read(ROOT / "deploy" / "docker" / f"{role}.Dockerfile")


@pytest.fixture
def directory() -> Iterator[Path]:
    """Not in /tmp, which the sandbox covers."""
    found = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="chiasm-image-"))
    try:
        yield found
    finally:
        shutil.rmtree(found)


@pytest.mark.parametrize("role", ROLES)
def test_what_the_steps_install_runs_without_rights(role: str, directory: Path) -> None:
    if role != "gateway" and "CHIASM_TEST_IMAGES" not in os.environ:
        pytest.skip("`make test-images` replays it: torch is installed once more, 1.5 GB")
    if trouble := sandbox_trouble():
        pytest.skip(f"no sandbox here: {trouble}")
    image = Image(directory, stages(role))
    image.build()
    packages = json.loads((directory / "opt" / "packages.json").read_text())["installed"]
    names = {package["metadata"]["name"] for package in packages}
    assert "chiasm" in names
    assert not names & UNWANTED[role]
    env = {"CHIASM_PORT": str(free_port())}
    with image.start(image.command("ENTRYPOINT", "--model", "demo", *FLAGS[role]), env) as service:
        try:
            assert service.stdout is not None
            lines = []
            for line in service.stdout:
                lines.append(line)
                if line.startswith(f"chiasm-ready role={role}"):
                    break
            assert lines and lines[-1].startswith("chiasm-ready"), "".join(lines)
            assert "CapEff:\t0000000000000000\n" in Path(f"/proc/{service.pid}/status").read_text()
            until(lambda: is_well(image, env), PATIENCE_S, "the service is well")
        finally:
            service.send_signal(signal.SIGTERM)
            assert service.wait(PATIENCE_S) == 0
    assert not is_well(image, env), "nobody is there any more"


def is_well(image: Image, env: dict[str, str]) -> bool:
    """What HEALTHCHECK says."""
    with image.start(image.command("HEALTHCHECK"), env) as probe:
        output, _ = probe.communicate(timeout=PATIENCE_S)
    assert probe.returncode in (0, 1) and not output, output
    return probe.returncode == 0


@pytest.mark.parametrize("role", ROLES)
def test_the_rest_of_the_file_is_what_the_replay_takes_it_for(role: str) -> None:
    _, final = stages(role)
    users, *others = final.all("RUN")
    assert users == f"useradd --system --uid {UID} --no-create-home chiasm"
    assert all(step.startswith('if [ -n "$RUNTIME_PACKAGES" ]; then') for step in others)
    assert final.one("USER") == UID
    assert final.one("COPY") == "--from=build /opt/chiasm /opt/chiasm"
    assert final.env()["HOME"] == "/tmp"
    assert final.command("CMD") == ["--model", "demo"]
