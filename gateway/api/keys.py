"""API keys: the file holds SHA-256 digests, never keys. Everything is closed unless listed open.

The file is read again when it changes. One that cannot be used changes nothing: keys that were
good stay good, and nobody else is let in.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from chiasm.errors import Unauthenticated
from gateway.tenants import KeyLimits

logger = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_EVERY_KEY = "*"  # in place of a digest: limits of the keys that name none
_LOOK_S = 1.0  # between looks at the file

Stamp = tuple[int, int, int]


class ApiKeys:
    """The keys that are let in; none = everybody is.

    Args:
        digests: SHA-256 of every key, with the key's limits.
        path: Where they came from; read again when it changes.
        stamp: Of the file, from before it was read.
        clock: Seconds.
    """

    def __init__(
        self,
        digests: Mapping[bytes, KeyLimits] | Sequence[bytes] = (),
        *,
        path: Path | None = None,
        stamp: Stamp | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._stamp = stamp
        self._clock = clock
        self._looked = clock()
        self._use(digests if isinstance(digests, Mapping) else dict.fromkeys(digests, KeyLimits()))

    @classmethod
    def from_file(cls, path: str, *, clock: Callable[[], float] = time.monotonic) -> ApiKeys:
        """One hex digest a line, then limits such as `inflight=4`, or `*` for the others' limits.

        Blank lines and lines that begin with # are skipped.

        Raises:
            ValueError: The file cannot be read, has another line, or no digest at all.
        """
        if not path:
            return cls()
        stamp = _stamp(Path(path))
        return cls(_read(Path(path)), path=Path(path), stamp=stamp, clock=clock)

    def tenant(self, authorizations: Sequence[str]) -> bytes:
        """The tenant of a request, as a salt for caches; empty when no keys are asked for.

        Args:
            authorizations: Every authorization header of the request.

        Raises:
            Unauthenticated: There is not exactly one, it is no bearer key, or the key is unknown.
        """
        self._look()
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
        return _tenant(digest)

    def limits_of(self, tenant: bytes) -> KeyLimits:
        """What `tenant` returned may use."""
        return self._limits.get(tenant, KeyLimits())

    def _use(self, digests: Mapping[bytes, KeyLimits]) -> None:
        self._digests = tuple(digests)
        self._limits = {_tenant(digest): limits for digest, limits in digests.items()}

    def _look(self) -> None:
        """Reads a file that has changed."""
        if self._path is None or self._clock() - self._looked < _LOOK_S:
            return
        self._looked = self._clock()
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            digests = _read(self._path)
        except ValueError as error:
            logger.error("%s; the keys are those of before", error)
            return
        self._use(digests)
        logger.info("%d API keys from %s", len(digests), self._path)


def _read(path: Path) -> dict[bytes, KeyLimits]:
    where = f"--api-key-file {path}"
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: cannot be read") from error
    found: dict[bytes, KeyLimits | None] = {}
    others = KeyLimits()
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        digest, *words = line.split()
        if digest != _EVERY_KEY and not _DIGEST.fullmatch(digest):
            raise ValueError(f"{where}: line {number} is no SHA-256 in hex")
        try:
            limits = KeyLimits.parse(words)
        except ValueError as error:
            raise ValueError(f"{where}: line {number}: {error}") from None
        if digest == _EVERY_KEY:
            others = limits
        else:
            found[bytes.fromhex(digest)] = limits if words else None
    if not found:
        raise ValueError(f"{where}: no key in it")
    return {digest: limits or others for digest, limits in found.items()}


def _tenant(digest: bytes) -> bytes:
    return hashlib.sha256(b"chiasm tenant\0" + digest).digest()


def _stamp(path: Path) -> Stamp:
    """Changes whenever the file does, also behind a symbolic link."""
    try:
        state = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (state.st_mtime_ns, state.st_ino, state.st_size)
