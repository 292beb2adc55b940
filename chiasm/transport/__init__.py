"""How rows move between encoder and decoder: two protocols, one file per backend."""

from chiasm.transport.base import (
    STREAM,
    Destination,
    OpenReceiver,
    OpenSender,
    Receiver,
    RowSource,
    Send,
    Sender,
)

__all__ = [
    "STREAM",
    "Destination",
    "OpenReceiver",
    "OpenSender",
    "Receiver",
    "RowSource",
    "Send",
    "Sender",
]
