"""Every TCP port that a process and what it has started listen on, as the kernel tells it."""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"


@dataclass(frozen=True, order=True)
class Port:
    """One listening socket."""

    host: str
    port: int
    owner: str
    """The owner's command line."""

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback


def listening(pid: int) -> set[Port]:
    """Of the process and all its descendants."""
    found = set()
    for member in family(pid):
        with suppress(OSError):
            sockets = _sockets(member)
            command = Path(f"/proc/{member}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            for descriptor in os.scandir(f"/proc/{member}/fd"):
                with suppress(OSError):
                    where = sockets.get(os.readlink(descriptor.path))
                    if where is not None:
                        found.add(Port(*where, command.strip()))
    return found


def family(pid: int) -> list[int]:
    """The process and its descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(fields[1])
    members = [pid]
    for member in members:
        members += [child for child, parent in parents.items() if parent == member]
    return members


def _sockets(pid: int) -> dict[str, tuple[str, int]]:
    """What /proc/PID/fd/N shows -> address, of all that listen in the process's network."""
    found = {}
    for table in (f"/proc/{pid}/net/tcp", f"/proc/{pid}/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN:
                    host, _, port = fields[1].partition(":")
                    found[f"socket:[{fields[9]}]"] = (_address(host), int(port, 16))
    return found


def _address(text: str) -> str:
    """Words of four bytes, each in the machine's order."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
