"""In-memory stand-ins for every service's tests: no torch, no model, every fault on request."""

from chiasm.fakes.decoder import FakeDecoder, Script
from chiasm.fakes.encoder import EncoderFaults, FakeEncoder
from chiasm.fakes.pair import serve_pair
from chiasm.fakes.rows import pattern_rows
from chiasm.fakes.serving import serving

__all__ = [
    "EncoderFaults",
    "FakeDecoder",
    "FakeEncoder",
    "Script",
    "pattern_rows",
    "serve_pair",
    "serving",
]
