"""Certificates for tests, made by the openssl command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
NAME = "chiasm"


@dataclass(frozen=True)
class Identity:
    """A certificate and its key, and the CA file that goes with them."""

    certificate: Path
    key: Path
    ca: Path

    @property
    def flags(self) -> tuple[str, ...]:
        """Of a service that shows it."""
        files = ("cert", self.certificate), ("key", self.key), ("ca", self.ca)
        return tuple(f"--tls-{name}-file={file}" for name, file in files)

    def replace_by(self, other: Identity) -> None:
        """Puts another's content into these files, one after the other."""
        for ours, theirs in (
            (self.ca, other.ca),
            (self.certificate, other.certificate),
            (self.key, other.key),
        ):
            fresh = ours.with_suffix(".new")
            fresh.write_bytes(theirs.read_bytes())
            fresh.replace(ours)


class Authority:
    """A CA of its own, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self.certificate = directory / "ca.crt"
        self._run(
            *("req", "-x509", *_KEY, "-keyout", "ca.key", "-out", "ca.crt"),
            *("-days", "2", "-subj", f"/CN={directory.name}"),
        )

    def issue(self, name: str, *, days: int = 1, dns: str = NAME) -> Identity:
        """A certificate for `dns`; with negative days it has expired."""
        self._run(
            *("req", "-new", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr"),
            *("-subj", f"/CN={name}"),
        )
        extensions = self._directory / f"{name}.ext"
        kind = "IP" if dns[:1].isdigit() else "DNS"
        extensions.write_text(f"subjectAltName={kind}:{dns}\n")
        self._run(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-out", f"{name}.crt", "-days", str(days)),
            *("-extfile", str(extensions)),
        )
        own_ca = self._directory / f"{name}.ca"
        own_ca.write_bytes(self.certificate.read_bytes())
        return Identity(self._directory / f"{name}.crt", self._directory / f"{name}.key", own_ca)

    def _run(self, *arguments: str) -> None:
        command = ("openssl", *arguments)
        subprocess.run(command, cwd=self._directory, check=True, capture_output=True)
