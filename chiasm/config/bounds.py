"""Numbers of which some would make no sense."""

from __future__ import annotations


def check_positive(config: object, *names: str) -> None:
    """Raises ValueError that names the flag, unless all of these settings are above zero."""
    for name in names:
        if (value := getattr(config, name)) <= 0:
            raise ValueError(f"{_flag(name)} must be positive, got {value}")


def check_not_negative(config: object, *names: str) -> None:
    """Raises ValueError that names the flag when one of these settings is below zero."""
    for name in names:
        if (value := getattr(config, name)) < 0:
            raise ValueError(f"{_flag(name)} must not be negative, got {value}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
