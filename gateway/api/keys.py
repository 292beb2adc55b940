"""API keys: the file holds SHA-256 digests, never keys. Everything is closed unless listed open."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from pathlib import Path

from chiasm.errors import Unauthenticated

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


class ApiKeys:
    """The keys that are let in; none = everybody is.

    Args:
        digests: SHA-256 of every key.
    """

    def __init__(self, digests: Sequence[bytes] = ()) -> None:
        self._digests = tuple(digests)

    @classmethod
    def from_file(cls, path: str) -> ApiKeys:
        """One hex digest a line; blank lines and lines that begin with # are skipped.

        Raises:
            ValueError: The file cannot be read, has another line, or no digest at all.
        """
        if not path:
            return cls()
        try:
            lines = Path(path).read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--api-key-file {path}: cannot be read") from error
        digests = []
        for number, line in enumerate(map(str.strip, lines), start=1):
            if not line or line.startswith("#"):
                continue
            if not _DIGEST.fullmatch(line):
                raise ValueError(f"--api-key-file {path}: line {number} is no SHA-256 in hex")
            digests.append(bytes.fromhex(line))
        if not digests:
            raise ValueError(f"--api-key-file {path}: no key in it")
        return cls(digests)

    def tenant(self, authorizations: Sequence[str]) -> bytes:
        """The tenant of a request, as a salt for caches; empty when no keys are asked for.

        Args:
            authorizations: Every authorization header of the request.

        Raises:
            Unauthenticated: There is not exactly one, it is no bearer key, or the key is unknown.
        """
        if not self._digests:
            return b""
        if len(authorizations) != 1:
            raise Unauthenticated("give exactly one header: authorization: Bearer <key>")
        scheme, _, key = authorizations[0].strip().partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        known = False
        for candidate in self._digests:  # all of them, whichever matches
            known |= hmac.compare_digest(candidate, digest)
        if scheme.lower() != "bearer" or not known:
            raise Unauthenticated("the API key is not valid")
        return hashlib.sha256(b"chiasm tenant\0" + digest).digest()
