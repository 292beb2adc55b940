"""What a file is, by its first bytes alone: declared types and file names are never believed."""

from __future__ import annotations

from chiasm.errors import InvalidMedia
from chiasm.formats import IMAGE_FORMATS, VIDEO_FORMATS
from chiasm.plan import Modality

_PREFIXES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
    (b"FLV\x01", "video/x-flv"),
    (b"OggS", "video/ogg"),
    (b"\x00\x00\x01\xba", "video/mpeg"),
    (b"\x00\x00\x01\xb3", "video/mpeg"),
)
_AVIF_BRANDS = (b"avif", b"avis")
_HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")
_QUICKTIME_ATOMS = (b"moov", b"mdat", b"wide", b"free", b"skip")
_TS_PACKET = 188
_TS_SYNC = 0x47


def sniff(data: bytes, modality: Modality, *, param: str) -> str:
    """The media type of `data`.

    Raises:
        InvalidMedia: Not one of the accepted formats of this modality; the message lists them.
    """
    found = media_type(data)
    accepted = IMAGE_FORMATS if modality is Modality.IMAGE else VIDEO_FORMATS
    if found in accepted:
        return found
    names = ", ".join(sorted(name.partition("/")[2].removeprefix("x-") for name in accepted))
    if not data:
        what = "the file is empty"
    elif found is None:
        what = "the bytes are not a known format"
    else:
        what = f"the bytes are {found}"
    if modality is Modality.VIDEO:
        what = f"no decodable video stream: {what}"
    raise InvalidMedia(f"{what}; accepted {modality.value} formats: {names}", param=param)


def media_type(data: bytes) -> str | None:
    """The type of the bytes, also of some that are not accepted; None when unknown."""
    head = data[:64]
    for prefix, name in _PREFIXES:
        if head.startswith(prefix):
            return name
    return _container(data) or _refused(head)


def _container(data: bytes) -> str | None:
    head = data[:16]
    if head[:4] == b"RIFF":
        return {b"WEBP": "image/webp", b"AVI ": "video/x-msvideo"}.get(head[8:12])
    if head[4:8] == b"ftyp":
        return _iso_media(data)
    if head[:4] == b"\x1aE\xdf\xa3":
        return "video/webm" if b"webm" in data[:4096] else "video/x-matroska"
    if head[4:8] in _QUICKTIME_ATOMS:
        return "video/quicktime"
    if len(data) >= 2 * _TS_PACKET and data[0] == data[_TS_PACKET] == _TS_SYNC:
        return "video/mp2t"
    return None


def _iso_media(data: bytes) -> str:
    """ISO base media: the major brand first, then the compatible ones."""
    size = min(int.from_bytes(data[:4], "big"), 256)
    brands = [data[8:12], *(data[i : i + 4] for i in range(16, size - 3, 4))]
    if brands[0] in _AVIF_BRANDS or (brands[0] in _HEIC_BRANDS and b"avif" in brands):
        return "image/avif"
    if brands[0] in _HEIC_BRANDS:
        return "image/heic"
    return "video/quicktime" if brands[0] == b"qt  " else "video/mp4"


def _refused(head: bytes) -> str | None:
    """Names for what people send by mistake, so that the refusal says what it saw."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head")):
        return "text/html"
    if text.startswith((b"<?xml", b"<svg")):
        return "image/svg+xml"
    if head.startswith(b"ID3") or head[:2] in (b"\xff\xfb", b"\xff\xf3"):
        return "audio/mpeg"
    if head.startswith(b"0&\xb2u\x8ef\xcf\x11"):
        return "video/x-ms-asf"
    return None
