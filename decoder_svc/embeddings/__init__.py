"""Embeddings in the decoder: the receiver decides, the fetcher moves, the slab holds."""
