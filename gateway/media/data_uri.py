"""The one data URI parser. Tolerant of spellings seen in the wild, strict about the payload.

The declared media type is ignored: magic bytes decide (`sniff`).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable

from chiasm.errors import InvalidMedia, TooLarge

try:
    import pybase64
except ImportError:  # where there is no wheel of it; the standard library's takes 30 times as long
    _decode: Callable[..., bytes] = base64.b64decode
else:
    _decode = pybase64.b64decode

_HEAD = re.compile(r"\s*data:([^,]{0,512}),", re.IGNORECASE)
_BLANK = re.compile(r"\s+")
_URL_SAFE = str.maketrans("-_", "+/")


def is_data_uri(url: str) -> bool:
    """Whether the scheme is `data`, in any case, with or without leading blanks."""
    return url[:64].lstrip()[:5].lower() == "data:"


def parse_data_uri(url: str, *, max_bytes: int, param: str) -> bytes:
    """The payload. Alphabet standard or URL-safe, blanks anywhere, padding optional.

    Raises:
        InvalidMedia: No base64 flag, an empty payload, or one that is not base64.
        TooLarge: More than `max_bytes` once decoded.
    """
    head = _HEAD.match(url)
    if head is None:
        raise InvalidMedia("the data URI has no comma between its header and its data", param=param)
    flags = [flag.strip().lower() for flag in head.group(1).split(";")]
    if "base64" not in flags[1:]:
        raise InvalidMedia(
            "the data URI is not base64: write data:<type>;base64,<data>", param=param
        )
    if (len(url) - head.end()) // 4 * 3 > max_bytes + len(url) // 16 + 64:  # room for line breaks
        raise TooLarge(f"the medium is larger than {max_bytes} bytes", param=param)
    payload = url[head.end() :]
    data = strict_base64(payload)
    if data is None:
        data = strict_base64(_tidied(payload))
    if data is None:
        raise InvalidMedia("the data URI's payload is not base64", param=param)
    if not data:
        raise InvalidMedia("the data URI is empty", param=param)
    if len(data) > max_bytes:
        raise TooLarge(f"the medium is larger than {max_bytes} bytes", param=param)
    return data


def strict_base64(payload: str | memoryview) -> bytes | None:
    """What nearly everybody sends: the standard alphabet, padded, nothing else. None: it is not."""
    try:
        return _decode(payload, validate=True)
    except (binascii.Error, ValueError):
        return None


def _tidied(payload: str) -> str:
    """The same in the standard spelling."""
    payload = _BLANK.sub("", payload).replace("%2B", "+").replace("%2F", "/")
    payload = payload.replace("%3D", "=").translate(_URL_SAFE).rstrip("=")
    return payload + "=" * (-len(payload) % 4)
