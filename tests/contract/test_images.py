"""The container files name things that exist: sources, extras, modules, settings."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import chiasm
from chiasm.cli.service import CONFIG_CLASSES
from chiasm.config.load import settings

ROOT = Path(__file__).resolve().parents[2]
IMAGES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
KNOWN_ENV = {setting.env for cls in CONFIG_CLASSES for setting in settings(cls)}


def test_there_is_one_per_role() -> None:
    roles = [path.name.removesuffix(".Dockerfile") for path in IMAGES]
    assert roles == ["decoder", "encoder", "gateway"]


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_image_files_fit_the_tree(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M):
        for source in line.split():
            assert (ROOT / source).exists()
            assert f"!{source}" in ignored, "the build context leaves it out"
    extras = re.findall(r"'\.\[([\w,]+)\]'|^ARG EXTRAS=([\w,]+)$", text, re.M)
    named = {extra for pair in extras for word in pair if word for extra in word.split(",")}
    assert named
    assert named <= EXTRAS.keys()
    assert set(re.findall(r"\bCHIASM_\w+", text)) <= KNOWN_ENV
    module = re.search(r'^ENTRYPOINT \["python", "-m", "(\w+)"\]$', text, re.M)
    assert module is not None
    assert (ROOT / module[1] / "__main__.py").is_file()
    assert f"COPY {module[1]} {module[1]}" in text
    assert re.search(r"^USER 10001$", text, re.M), "runs as root"


@pytest.mark.parametrize("gpu", ["", "1"])
def test_what_make_images_asks_for_exists(gpu: str) -> None:
    """The script with `echo` for docker: files, tags, and arguments that the files declare."""
    env = {"PATH": os.environ["PATH"], "DOCKER": "echo", "REPO": "r", "GPU": gpu, "PUSH": "1"}
    env["CUDA_BASE"] = "cuda" if gpu else ""
    script = ROOT / "deploy" / "docker" / "build.sh"
    done = subprocess.run([script], env=env, capture_output=True, text=True, check=True)
    built = [line for line in done.stdout.splitlines() if line.startswith("build ")]
    version = re.escape(chiasm.__version__)
    assert re.findall(rf"^push r-(\w+):{version}$", done.stdout, re.M) == [
        "gateway",
        "encoder",
        "decoder",
    ]
    for line in built:
        (path,) = re.findall(r"-f (\S+)", line)
        declared = set(re.findall(r"^ARG (\w+)", (ROOT / path).read_text(), re.M))
        assert set(re.findall(r"--build-arg (\w+)=", line)) <= declared
        for extras in re.findall(r"EXTRAS=(\S+)", line):
            assert set(extras.split(",")) <= EXTRAS.keys()
    assert ("FLASHINFER_CUDA_ARCH_LIST=8.0 9.0a" in built[-1]) is bool(gpu)


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_health_is_asked_of_the_right_role(path: Path) -> None:
    role = path.name.removesuffix(".Dockerfile")
    assert f'CMD ["python", "-I", "-m", "chiasm.probe", "{role}"]' in path.read_text()


def test_the_gateways_image_gets_no_torch() -> None:
    text = (ROOT / "deploy" / "docker" / "gateway.Dockerfile").read_text(encoding="utf-8")
    assert not re.search(r"torch==|encoder_svc|decoder_svc", text)
    words = " ".join(EXTRAS["gateway"] + EXTRAS["kubernetes"])
    assert not re.search(r"torch|transformers|safetensors", words)
