"""Attention over paged K and V, one file per backend."""
