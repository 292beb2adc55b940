"""Attention backends by name, imported when first asked for."""

from __future__ import annotations

from importlib import import_module

from encoder_svc.layers.attention.base import SegmentAttention

_BACKENDS = {
    "reference": ("encoder_svc.layers.attention.reference", "ReferenceAttention"),
    "fused": ("encoder_svc.layers.attention.fused", "FusedAttention"),
}


def load_attention(name: str) -> SegmentAttention:
    """Raises ValueError for a name that is not known."""
    if name not in _BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; known: {', '.join(_BACKENDS)}")
    module, attribute = _BACKENDS[name]
    backend: SegmentAttention = getattr(import_module(module), attribute)()
    return backend
