"""A real API server with its etcd, started for a test as two processes: no controller, no node."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.integration.cluster import free_port

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("CHIASM_TEST_APISERVER", ROOT / ".apiserver")) / "bin"
MISSING = f"no {CACHE}/kube-apiserver: `make apiserver` builds it (5 minutes, once, on Debian 12)"
EDITION = "2"  # of the build
ADMIN = "the-admins-token"
READY_S = 180.0


def is_built() -> bool:
    """Whether `make apiserver` has run."""
    edition = CACHE / "edition"
    return edition.is_file() and edition.read_text().strip() == EDITION


class ControlPlane:
    """Owns etcd and kube-apiserver. What they keep survives `kill`.

    Args:
        directory: For their data, keys and logs.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self._etcd_port = free_port()
        self._etcd: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        run = ("openssl", "genrsa", "-out", "sa.key", "2048")
        subprocess.run(run, cwd=directory, check=True, capture_output=True)
        run = ("openssl", "rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub")
        subprocess.run(run, cwd=directory, check=True, capture_output=True)
        (directory / "tokens.csv").write_text(f'{ADMIN},admin,1,"system:masters"\n')

    @property
    def url(self) -> str:
        """https, with a certificate of its own making."""
        return f"https://127.0.0.1:{self.port}"

    @property
    def certificate(self) -> Path:
        """What it shows, with its CA."""
        return self.directory / "certs" / "apiserver.crt"

    def start(self) -> None:
        """Starts both; the API server is ready when this returns."""
        own = f"http://127.0.0.1:{self._etcd_port}"
        self._etcd = self._spawn(
            "etcd",
            *("--data-dir", "etcd", "--unsafe-no-fsync"),
            *("--listen-client-urls", own, "--advertise-client-urls", own),
            *("--listen-peer-urls", f"http://127.0.0.1:{free_port()}"),
        )
        self.start_api_server()

    def start_api_server(self) -> None:
        """Starts the API server, again if it was killed."""
        self._server = self._spawn(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--cert-dir=certs",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-account-signing-key-file=sa.key",
            "--service-account-key-file=sa.pub",
            "--token-auth-file=tokens.csv",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",  # its controller is not here
            "--profiling=false",
        )
        until(self._is_ready, READY_S, "the API server is not ready, see its log")

    def kill_api_server(self) -> None:
        """Ends the API server at once; etcd stays."""
        assert self._server is not None
        self._server.send_signal(signal.SIGKILL)
        self._server.wait(10)

    def stop(self) -> None:
        """Ends both."""
        for process in (self._server, self._etcd):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait(10)

    def _is_ready(self) -> bool:
        assert self._server is not None
        if self._server.poll() is not None:
            log = (self.directory / "kube-apiserver.log").read_text(errors="replace")
            raise RuntimeError("the API server has ended:\n" + log[-3000:])
        headers = {"authorization": f"Bearer {ADMIN}"}
        try:
            reply = httpx.get(f"{self.url}/readyz", headers=headers, verify=False, timeout=2)
        except httpx.HTTPError:
            return False
        return reply.status_code == 200

    def _spawn(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.directory / f"{program}.log").open("ab") as log:
            command = (str(CACHE / program), *arguments)
            return subprocess.Popen(command, cwd=self.directory, stdout=log, stderr=log)


def until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Polls until it comes true; returns the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
    return time.monotonic() - began
