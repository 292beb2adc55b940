"""An address of this machine."""

from __future__ import annotations

import socket


def own_address() -> str:
    """An IPv4 address of this machine that is not loopback, or "": nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation
        except OSError:
            return ""
        found = str(probe.getsockname()[0])
    return "" if found.startswith(("127.", "169.254.", "0.")) else found
