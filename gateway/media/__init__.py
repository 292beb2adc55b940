"""Getting media in: data URIs, guarded fetches, types by magic bytes, sizes by header."""

from gateway.media.fetch import MediaFetcher
from gateway.media.header import MediaHeader, read_header

__all__ = ["MediaFetcher", "MediaHeader", "read_header"]
