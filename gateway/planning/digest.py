"""The digest of a medium: what caches on both sides are keyed by. A URL is never a key."""

from __future__ import annotations

import dataclasses
import hashlib

from chiasm.digest import canonical_json
from chiasm.plan import MediaPlan


def media_digest(
    media_sha256: bytes, plan: MediaPlan, *, tower: bytes, processor: bytes, salt: bytes
) -> bytes:
    """SHA-256 over the media bytes' SHA-256, the plan, both model digests and the tenant's salt.

    The plan covers sizes, frames and options; its own digest field is left out.
    """
    fields = dataclasses.asdict(plan)
    del fields["digest"]
    digest = hashlib.sha256(b"chiasm-media-1")
    for piece in (media_sha256, tower, processor, salt, canonical_json(fields)):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.digest()
