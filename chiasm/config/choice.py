"""Settings that take one word out of a few."""

from __future__ import annotations


def check_choice(flag: str, value: str, *choices: str) -> None:
    """Raises ValueError that names the flag, unless `value` is one of at least two choices."""
    if value not in choices:
        known = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise ValueError(f"{flag} must be {known}, got {value!r}")
