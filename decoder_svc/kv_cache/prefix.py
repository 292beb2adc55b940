"""Finds pages that hold the K and V of a prompt's beginning.

A page's key is SHA-256 over the key before it, its tokens, and every medium it touches (digest, and
where the medium begins relative to the page). The chain is rooted in cache salt and adapter, so
tenants share nothing, and equal placeholder ids of different pictures never meet.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from decoder_svc.kv_cache.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Where in the prompt a medium's placeholders lie: [begin, end)."""

    begin: int
    end: int
    digest: bytes


def root_key(cache_salt: bytes, adapter_id: str) -> bytes:
    """The key before the first page."""
    adapter = adapter_id.encode()
    header = struct.pack("<II", len(cache_salt), len(adapter))
    return hashlib.sha256(header + cache_salt + adapter).digest()


def block_key(
    before: bytes, tokens: Sequence[int], begin: int, media: Sequence[MediaSpan]
) -> bytes:
    """The key of the page that holds `tokens`, of which the first is at position `begin`."""
    digest = hashlib.sha256(before + array("I", tokens).tobytes())
    end = begin + len(tokens)
    for span in media:
        if span.begin < end and span.end > begin:
            digest.update(struct.pack("<q", span.begin - begin))
            digest.update(span.digest)
    return digest.digest()


class PrefixIndex:
    """Pages by key. Holds none: a page it knows may be free, and is forgotten when overwritten."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        pool.bind(self._forget)

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest known beginning of `keys`; not retained."""
        found = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, key: bytes, block: int) -> None:
        """A held page is full and computed. Where the key is known already, that page stays."""
        if key not in self._blocks:
            assert block not in self._keys, "a page has one content"
            self._blocks[key] = block
            self._keys[block] = key
            self._pool.mark_cached(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Nobody finds these pages any more; those it does not know are none of its business."""
        known = [block for block in blocks if block in self._keys]
        self._pool.unmark_cached(known)
        for block in known:
            self._forget(block)

    def clear(self) -> None:
        """Forgets every page."""
        self._pool.unmark_cached(self._keys)
        self._blocks.clear()
        self._keys.clear()

    def _forget(self, block: int) -> None:
        del self._blocks[self._keys.pop(block)]

    def check(self) -> None:
        """Raises AssertionError when the two directions, or index and pool, disagree."""
        assert {block: key for key, block in self._blocks.items()} == self._keys
        assert all(self._pool.is_cached(block) for block in self._keys)
