"""The one exception of the `chiasm` commands."""

from __future__ import annotations


class CommandFailed(Exception):
    """A command cannot do its work; the message is one sentence for the person at the terminal."""
