"""Pages and prefix keys: conservation under random use, and keys that depend on what they must."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder_svc.kv_cache.block_pool import BlockPool
from decoder_svc.kv_cache.prefix import MediaSpan, PrefixIndex, block_key, root_key

RED, BLUE = b"r" * 32, b"b" * 32


def test_a_cached_page_is_taken_last_and_longest_unused_first() -> None:
    pool = BlockPool(4)
    index = PrefixIndex(pool)
    pages = pool.allocate(4)
    index.insert(b"a", pages[0])
    index.insert(b"b", pages[1])
    pool.release(pages[:1])
    pool.release(pages[1:2])
    pool.release(pages[2:])
    assert set(pool.allocate(2)) == set(pages[2:])
    assert index.match([b"a"]) == [pages[0]]
    assert pool.allocate(1) == [pages[0]]
    assert index.match([b"a"]) == []
    assert index.match([b"b"]) == [pages[1]]


def test_of_a_cached_prompt_the_end_is_lost_first() -> None:
    pool = BlockPool(3)
    index = PrefixIndex(pool)
    pages = pool.allocate(3)
    for key, page in zip((b"a", b"b", b"c"), pages, strict=True):
        index.insert(key, page)
    pool.release(pages)
    pool.allocate(1)
    assert index.match([b"a", b"b", b"c"]) == pages[:2]


def test_a_shared_page_is_free_only_when_the_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    (page,) = pool.allocate(1)
    pool.retain([page])
    pool.release([page])
    assert pool.num_free == 1
    pool.release([page])
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="more often"):
        pool.release([page])


def test_a_key_that_is_known_keeps_its_page() -> None:
    pool = BlockPool(2)
    index = PrefixIndex(pool)
    first, second = pool.allocate(2)
    index.insert(b"a", first)
    index.insert(b"a", second)
    assert index.match([b"a"]) == [first]
    index.check()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pages_are_conserved_whatever_happens(data: st.DataObject) -> None:
    pool = BlockPool(8)
    index = PrefixIndex(pool)
    held: list[list[int]] = []
    for step in range(data.draw(st.integers(1, 40))):
        match data.draw(st.integers(0, 3)):
            case 0:
                count = data.draw(st.integers(0, pool.num_free))
                held.append(pool.allocate(count))
            case 1 if held:
                pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
            case 2 if held:
                pages = held[data.draw(st.integers(0, len(held) - 1))]
                for i, page in enumerate(p for p in pages if not pool.is_cached(p)):
                    index.insert(f"{step % 5}/{i}".encode(), page)
            case 3:
                start = data.draw(st.integers(0, 4))
                found = index.match([f"{start}/{i}".encode() for i in range(8)])
                pool.retain(found)
                held.append(found)
        pool.check()
        index.check()
        assert pool.num_free + pool.num_held == 8
        counts = pool.holders()
        assert sum(counts.values()) == sum(map(len, held))


def key(media: list[MediaSpan], *, tokens: tuple[int, ...] = (9, 9, 9, 9), begin: int = 4) -> bytes:
    return block_key(root_key(b"", ""), tokens, begin, media)


def test_a_key_covers_tokens_media_and_where_these_begin() -> None:
    keys = [
        key([]),
        key([], tokens=(9, 9, 9, 8)),
        key([MediaSpan(2, 20, RED)]),
        key([MediaSpan(2, 20, BLUE)]),
        key([MediaSpan(3, 20, RED)]),  # the same picture, one row further
        key([MediaSpan(2, 6, RED), MediaSpan(6, 20, BLUE)]),
        key([MediaSpan(2, 6, BLUE), MediaSpan(6, 20, RED)]),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(k) == 32 for k in keys)


def test_a_key_ignores_media_outside_its_page_and_the_prompt_before_it() -> None:
    inside = MediaSpan(5, 7, RED)
    assert key([inside]) == key([MediaSpan(0, 4, BLUE), inside, MediaSpan(8, 9, BLUE)])
    assert key([inside], begin=4) == key([MediaSpan(105, 107, RED)], begin=104)


def test_chains_of_other_tenants_and_adapters_never_meet() -> None:
    roots = [
        root_key(b"", ""),
        root_key(b"a", ""),
        root_key(b"", "a"),
        root_key(b"ab", "c"),
        root_key(b"a", "bc"),
    ]
    assert len({block_key(root, (1, 2), 0, []) for root in roots}) == len(roots)
