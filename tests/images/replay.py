"""Does what `docker build` and `docker run` would, without docker: a virtual environment in a
directory of its own, and a process without rights under a root it cannot write to.

The base image is the Python that runs the tests; steps that only set up the system's users and
packages are not replayed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.images.dockerfile import Stage

ROOT = Path(__file__).resolve().parents[2]
UID = "10001"
INSTALLED = "/opt/chiasm"
# A root that is read-only but for /tmp and /dev/shm, and a user that owns nothing.
_SANDBOX = (
    "mount -o remount,bind,ro /; mount -t tmpfs tmpfs /tmp; cd /tmp; "
    f'exec unshare --user --map-user={UID} --map-group={UID} -- "$@"'
)


class Image:
    """One image, as a directory: `opt` stands for /opt/chiasm, `src` for the build stage's /src."""

    def __init__(self, directory: Path, stages: list[Stage]) -> None:
        self._build, self._final = stages
        self._bin = directory / "bin"
        self._opt = directory / "opt"
        self._src = directory / "src"
        self._bin.mkdir()
        self._src.mkdir()
        base = Path(sys.base_prefix) / "bin" / Path(sys.executable).name
        python = self._bin / "python"
        python.write_text(f'#!/bin/sh\nexec {base} "$@"\n')
        python.chmod(0o755)

    def build(self) -> None:
        """Every COPY and RUN of the build stage, as they are written there."""
        arguments: dict[str, str] = {}
        for word, rest in self._build.steps:
            if word == "ARG":
                name, _, value = rest.partition("=")
                arguments[name] = value
            elif word == "COPY":
                *sources, target = rest.split()
                for source in sources:
                    self._copy(ROOT / source, self._src / target)
            elif word == "RUN":
                self._run(rest, arguments)

    def command(self, name: str, *more: str) -> list[str]:
        """ENTRYPOINT or HEALTHCHECK, with the image's own Python."""
        found = self._final.healthcheck() if name == "HEALTHCHECK" else self._final.command(name)
        assert found[0] == "python"
        return [str(self._opt / "bin" / "python"), *found[1:], *more]

    def start(self, command: list[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """A container's process: only the image's variables, no rights, a read-only root."""
        return subprocess.Popen(
            ("unshare", "--mount", "sh", "-ec", _SANDBOX, "sandbox", *command),
            env={**self.env(), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def env(self) -> dict[str, str]:
        """The image's variables."""
        path = f"{self._opt}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        return {**self._final.env(), "PATH": path}

    def _copy(self, source: Path, target: Path) -> None:
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, self._src)

    def _run(self, script: str, arguments: Mapping[str, str]) -> None:
        outside = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
        env = {**outside, **arguments, "PATH": f"{self._bin}:{os.environ['PATH']}"}
        script = script.replace(INSTALLED, str(self._opt))
        done = subprocess.run(
            ("sh", "-ec", script),
            cwd=self._src,
            env=env,
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def sandbox_trouble() -> str:
    """Why no sandbox can be had here; empty if it can."""
    command = ("unshare", "--mount", "sh", "-ec", _SANDBOX, "sandbox", "true")
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""
