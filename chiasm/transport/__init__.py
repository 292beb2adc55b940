"""How rows move between encoder and decoder: two protocols, one file per backend."""

from chiasm.transport.base import (
    DRAM,
    STREAM,
    VRAM,
    Destination,
    OpenReceiver,
    Outbound,
    Receiver,
    Region,
    RowSource,
    Send,
    Sender,
    WriteFailed,
)

__all__ = [
    "DRAM",
    "STREAM",
    "VRAM",
    "Destination",
    "OpenReceiver",
    "Outbound",
    "Receiver",
    "Region",
    "RowSource",
    "Send",
    "Sender",
    "WriteFailed",
]
