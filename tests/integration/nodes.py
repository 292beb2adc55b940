"""Hosts on one machine: network namespaces with addresses of their own, on one switch.

Needs the right to make namespaces, and `ip` of iproute2. This machine is on the switch as well.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

INTERFACE = "eth0"  # in every node
_SUBNET = f"198.{18 + os.getpid() // 256 % 2}.{os.getpid() % 256}"
"""Of the range reserved for benchmarks of networks, which is routed nowhere."""


class NotPermitted(Exception):
    """This machine gives us no namespaces."""


@dataclass(frozen=True)
class Host:
    """One node: the command prefix by which processes run on it, and its address."""

    name: str
    address: str
    cable: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Before a command that is to run here; the process is the command's own."""
        return ("ip", "netns", "exec", self.name)


class Network:
    """Owns the namespaces and the switch, which is in one of its own.

    Raises:
        NotPermitted: No namespaces here.
    """

    def __init__(self) -> None:
        self._tag = f"c{os.getpid()}"
        self._switch = f"{self._tag}s"
        self._hosts: list[Host] = []
        try:
            ip("netns", "add", self._switch)
            self._inside("link", "add", "switch", "type", "bridge")
            self._inside("link", "set", "switch", "up")
            cable = f"{self._tag}m"
            self._plug(cable, peer=f"{self._tag}x", into=None)
            ip("addr", "add", f"{_SUBNET}.254/24", "dev", f"{self._tag}x")
            ip("link", "set", f"{self._tag}x", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            detail = getattr(error, "stderr", "") or str(error)
            raise NotPermitted(f"no network namespaces here: {detail.strip()}") from None

    def add(self, name: str) -> Host:
        """A node of this network."""
        number = len(self._hosts) + 1
        host = Host(f"{self._tag}{name}", f"{_SUBNET}.{number}", f"{self._tag}n{number}")
        ip("netns", "add", host.name)
        self._hosts.append(host)
        self._plug(host.cable, peer=INTERFACE, into=host.name)
        ip("-n", host.name, "link", "set", "lo", "up")
        ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
        ip("-n", host.name, "link", "set", INTERFACE, "up")
        return host

    def cut(self, host: Host) -> None:
        """Pulls a node's cable: what is sent is lost, and nobody is told."""
        self._inside("link", "set", host.cable, "down")

    def mend(self, host: Host) -> None:
        """Puts it back."""
        self._inside("link", "set", host.cable, "up")

    def close(self) -> None:
        """Takes everything away. Interfaces go with their namespaces."""
        for name in (self._switch, *(host.name for host in self._hosts)):
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True)

    def _plug(self, cable: str, *, peer: str, into: str | None) -> None:
        """A cable from the switch to a node, or to this machine."""
        place = () if into is None else ("netns", into)
        ip(
            "link",
            "add",
            cable,
            "netns",
            self._switch,
            "type",
            "veth",
            "peer",
            "name",
            peer,
            *place,
        )
        self._inside("link", "set", cable, "master", "switch")
        self._inside("link", "set", cable, "up")

    def _inside(self, *arguments: str) -> None:
        ip("-n", self._switch, *arguments)


def ip(*arguments: str) -> None:
    """Runs `ip`. Raises CalledProcessError."""
    subprocess.run(("ip", *arguments), check=True, capture_output=True, text=True)
