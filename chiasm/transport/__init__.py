"""How rows move between encoder and decoder: two protocols, one file per backend."""

from chiasm.transport.base import STREAM, Destination, Receiver, RowSource, Sender

__all__ = ["STREAM", "Destination", "Receiver", "RowSource", "Sender"]
