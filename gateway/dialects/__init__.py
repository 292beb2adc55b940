"""How models of a family say that they think and call tools, as text."""

from gateway.dialects.registry import Dialect

__all__ = ["Dialect"]
