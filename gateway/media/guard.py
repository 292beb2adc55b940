"""Which hosts and addresses media may be fetched from. The address that was checked is dialled.

Refusals never say whether a private target exists: refused and unreachable read alike.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from chiasm.errors import InvalidMedia

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

CANNOT_FETCH = "the medium cannot be fetched from this URL"
"""The one message for every host that may not, or cannot, be reached."""

# IPv4 behind a translator (NAT64) or in the long dead compatible form: never dialled.
_TRANSLATED = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96")))
_NUMERIC_HOST = re.compile(r"[0-9a-fx.]+", re.IGNORECASE)
_ENDS_NUMERIC = re.compile(r"(?:^|\.)(?:[0-9]+|0x[0-9a-f]*)\.?$", re.IGNORECASE)
_LOOKUP_THREADS = 16
_SCHEMES = ("http", "https")


class Lookup(Protocol):
    """Turns a name into addresses; raises OSError when it has none."""

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """Numeric addresses."""
        ...


class SystemLookup:
    """The operating system's resolver, in threads of its own: slow names hold up nothing else."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_LOOKUP_THREADS, thread_name_prefix="lookup")

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """Numeric addresses; raises OSError when there are none."""
        loop = asyncio.get_running_loop()
        lookup = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await loop.run_in_executor(self._threads, lookup)
        return [str(entry[4][0]) for entry in found]

    def close(self) -> None:
        """Lets the threads go; a lookup under way is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def is_public(address: IPAddress) -> bool:
    """Whether the address, and any IPv4 address wrapped in it, is on the public internet."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.scope_id is None and is_public(address.ipv4_mapped)
        wrapped = (address.sixtofour, *(address.teredo or ()))
        if any(inner is not None and not is_public(inner) for inner in wrapped):
            return False
        if address.scope_id is not None or address.is_site_local:
            return False
        if any(address in network for network in _TRANSLATED):
            return False
    return address.is_global and not (
        address.is_multicast or address.is_reserved or address.is_unspecified
    )


class HostGuard:
    """Decides about URLs and hosts.

    Args:
        allowed_domains: Hosts by exact name, or `.example.org` for a domain and all below it; empty
            allows any host whose addresses are public.
        allow_private: Also dial private addresses.
        lookup: The name resolver; None = the system's.
    """

    def __init__(
        self,
        allowed_domains: Sequence[str] = (),
        *,
        allow_private: bool = False,
        lookup: Lookup | None = None,
    ) -> None:
        self._domains = tuple(domain.lower().rstrip(".") for domain in allowed_domains)
        self._allow_private = allow_private
        self._resolve: Lookup = lookup or SystemLookup()

    def check_url(self, url: str | URL, *, param: str) -> URL:
        """Scheme, credentials and host policy of one hop. Raises InvalidMedia.

        The value returned is what must be dialled: nobody parses the text a second time.
        """
        try:
            target = URL(url)
            host = (target.raw_host or "").lower().rstrip(".")
            port = target.port
        except (ValueError, TypeError):
            raise InvalidMedia("the URL cannot be parsed", param=param) from None
        if target.scheme not in _SCHEMES:
            raise InvalidMedia("media URLs are http, https, file or data", param=param)
        if not host or not port or target.user is not None:
            raise InvalidMedia("the URL needs a host, and no credentials", param=param)
        if self._domains and not any(_matches(host, domain) for domain in self._domains):
            raise InvalidMedia(CANNOT_FETCH, param=param)
        return target

    def close(self) -> None:
        """Ends the system's resolver, where it is ours."""
        if isinstance(self._resolve, SystemLookup):
            self._resolve.close()

    async def addresses(self, host: str, port: int) -> list[IPAddress]:
        """Every address of the host, all of them checked.

        Raises:
            OSError: None, or one that may not be dialled.
        """
        literal = parse_literal(host)
        if literal is not None:
            found: list[IPAddress] = [literal]
        else:
            found = [ipaddress.ip_address(text) for text in await self._resolve(host, port)]
        if not found or not (self._allow_private or all(is_public(one) for one in found)):
            raise OSError(CANNOT_FETCH)
        return found


class GuardedResolver(AbstractResolver):
    """aiohttp's resolver, behind the guard: what it returns is what is dialled, nothing else."""

    def __init__(self, guard: HostGuard) -> None:
        self._guard = guard

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Checked addresses only, already numeric. Raises OSError where there is none."""
        try:
            found = await self._guard.addresses(host, port)
        except ValueError as error:
            raise OSError(CANNOT_FETCH) from error
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET6 if address.version == 6 else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in found
        ]

    async def close(self) -> None:
        """Nothing is held."""


def parse_literal(host: str) -> IPAddress | None:
    """The address a host literally is, in any spelling the C library would take; None for a name.

    `2130706433`, `0x7f.1` and `0177.0.0.1` are all 127.0.0.1 to a resolver. A host that looks
    numeric and is none raises OSError: the URL standard forbids such names.
    """
    bare = host.strip("[]")
    try:
        return ipaddress.ip_address(bare)
    except ValueError:
        pass
    if not _ENDS_NUMERIC.search(bare):
        return None
    if not _NUMERIC_HOST.fullmatch(bare):
        raise OSError(CANNOT_FETCH)
    return ipaddress.IPv4Address(socket.inet_aton(bare.rstrip(".")))


def _matches(host: str, domain: str) -> bool:
    return host == domain.lstrip(".") or (domain.startswith(".") and host.endswith(domain))
