"""Getting media in: data URIs, guarded fetches, types by magic bytes, sizes by header."""

from gateway.media.fetch import MediaFetcher
from gateway.media.header import MediaHeader, read_header
from gateway.media.intake import Intake, Medium

__all__ = ["Intake", "MediaFetcher", "MediaHeader", "Medium", "read_header"]
