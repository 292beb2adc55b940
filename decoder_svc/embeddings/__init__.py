"""Embeddings in the decoder: the receiver decides, the fetcher moves, the slab holds."""

from decoder_svc.embeddings.receiver import EmbeddingReceiver
from decoder_svc.embeddings.slab import Slab

__all__ = ["EmbeddingReceiver", "Slab"]
