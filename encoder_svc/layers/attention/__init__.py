"""Attention within segments: a base and one file a backend."""
