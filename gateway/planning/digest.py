"""The digest of a medium: what caches on both sides are keyed by. A URL is never a key."""

from __future__ import annotations

import dataclasses
import hashlib

from chiasm.digest import canonical_json
from chiasm.plan import MediaPlan
from gateway.media.intake import Medium
from gateway.planning.base import Layout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What besides the medium decides about its rows, and who may share them."""

    tower: bytes
    processor: bytes
    salt: bytes


def seal(layout: Layout, medium: Medium, keys: Keys) -> MediaPlan:
    """The plan with its digest."""
    plan = layout.to_plan(media_bytes=len(medium.data))
    return dataclasses.replace(plan, digest=media_digest(medium.sha256, plan, keys))


def media_digest(media_sha256: bytes, plan: MediaPlan, keys: Keys) -> bytes:
    """SHA-256 over the media bytes' SHA-256, the plan, both model digests and the tenant's salt.

    The plan covers sizes, frames and options; its own digest field is left out.
    """
    fields = dataclasses.asdict(plan)
    del fields["digest"]
    digest = hashlib.sha256(b"chiasm-media-1")
    for piece in (media_sha256, keys.tower, keys.processor, keys.salt, canonical_json(fields)):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.digest()
