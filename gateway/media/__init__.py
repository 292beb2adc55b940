"""Getting media in: data URIs, guarded fetches, types by magic bytes, sizes by header."""

from gateway.media.header import MediaHeader
from gateway.media.intake import Intake, Medium

__all__ = ["Intake", "MediaHeader", "Medium"]
