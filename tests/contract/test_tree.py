"""What the repository may not contain: other machines' paths, registries' names, leftovers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = {".py", ".pyi", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".proto", ".html", ".svg"}
MOST_BYTES = 24 << 20  # of one tracked file

# Put together here, so that this file does not contain what it forbids.
REGISTRIES = ("py" + "pi.org", "pythonhosted" + ".org", "npm" + "js.org", "registry.npm" + "js")
MACHINE_PATHS = re.compile(
    "(?<![\\w.])/(?:" + "|".join(("home/\\w", "work/", "Users/\\w", "root/")) + ")"
)


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


FILES = tracked()


def is_text(name: str) -> bool:
    big_data = name.startswith("chiasm/demo/checkpoint/")
    return (Path(name).suffix in TEXT or "." not in Path(name).name) and not big_data


@pytest.mark.parametrize("name", [name for name in FILES if is_text(name)])
def test_text_speaks_of_the_project_alone(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not [host for host in REGISTRIES if host in text]
    assert not MACHINE_PATHS.findall(text)
    assert "\t" not in text or Path(name).name == "Makefile", "tabs"
    assert all(line == line.rstrip() for line in text.splitlines()), "trailing blanks"


def test_no_build_outputs_are_tracked() -> None:
    patterns = re.compile(r"(__pycache__|\.egg-info|\.pyc$|\.venv|\.log$|(^|/)(build|dist)/)")
    assert not [name for name in FILES if patterns.search(name)]


def test_no_file_is_huge() -> None:
    sizes = {name: (ROOT / name).stat().st_size for name in FILES}
    assert not {name: size for name, size in sizes.items() if size > MOST_BYTES}


def test_links_of_documents_lead_somewhere() -> None:
    link = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
    pages = [name for name in FILES if name.endswith(".md")]
    assert "README.md" in pages
    broken = [
        (page, target)
        for page in pages
        for target in link.findall((ROOT / page).read_text(encoding="utf-8"))
        if not (ROOT / page).parent.joinpath(target).exists()
    ]
    assert not broken
