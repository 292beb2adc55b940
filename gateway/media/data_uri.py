"""The one data URI parser. Tolerant of spellings seen in the wild, strict about the payload.

The declared media type is ignored: magic bytes decide (`sniff`).
"""

from __future__ import annotations

import base64
import binascii
import re

from chiasm.errors import InvalidMedia, TooLarge

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
    payload = _BLANK.sub("", url[head.end() :]).replace("%2B", "+").replace("%2F", "/")
    payload = payload.replace("%3D", "=").translate(_URL_SAFE).rstrip("=")
    try:
        data = base64.b64decode(payload + "=" * (-len(payload) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidMedia("the data URI's payload is not base64", param=param) from None
    if not data:
        raise InvalidMedia("the data URI is empty", param=param)
    if len(data) > max_bytes:
        raise TooLarge(f"the medium is larger than {max_bytes} bytes", param=param)
    return data
