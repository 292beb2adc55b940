"""The container files name things that exist: sources, extras, modules, settings."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

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


def test_the_gateways_image_gets_no_torch() -> None:
    text = (ROOT / "deploy" / "docker" / "gateway.Dockerfile").read_text(encoding="utf-8")
    assert not re.search(r"torch==|encoder_svc|decoder_svc", text)
    words = " ".join(EXTRAS["gateway"] + EXTRAS["kubernetes"])
    assert not re.search(r"torch|transformers|safetensors", words)
