"""The encoder service: bytes and a plan in, rows of embeddings out."""
