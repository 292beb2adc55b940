"""All services on this machine: encoders, a decoder and a gateway, each a process of its own."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from cyclopts import Parameter

from chiasm.cli.failure import CommandFailed
from chiasm.cli.service import parse
from chiasm.config import DecoderConfig, EncoderConfig, GatewayConfig
from chiasm.config.load import to_mapping
from chiasm.process import DidNotStart, Relay, Spec, Supervisor

_Flags = Annotated[str, Parameter(allow_leading_hyphen=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What runs, and with which flags beyond the usual ones."""

    model: str = "demo"
    """Checkpoint directory, hub id, or `demo`."""
    encoders: int = 2
    """Encoder processes."""
    tp_size: int = 1
    """Tensor parallel ranks of the decoder, each a process of its own."""
    pp_size: int = 1
    """Pipeline stages of the decoder."""
    mm_enable_dp_encoder: bool = False
    """One encoder on each of the decoder's GPUs, which it shares, in place of --encoders."""
    host: str = "127.0.0.1"
    """Address the gateway binds."""
    port: int = 8000
    """Port of the REST face; 0 takes a free one."""
    grpc_port: int = 0
    """Port of the gRPC face; 0 takes a free one."""
    drain_s: float = 30.0
    """Seconds to finish work after Ctrl-C before it is cancelled."""
    log_level: str = "info"
    """debug, info, warning or error."""
    encoder_args: _Flags = ""
    """More flags for every encoder, as one text, such as "--device cuda:1"."""
    decoder_args: _Flags = ""
    """More flags for the decoder."""
    gateway_args: _Flags = ""
    """More flags for the gateway."""

    def __post_init__(self) -> None:
        if self.encoders < 1:
            raise ValueError(f"--encoders must be at least 1, got {self.encoders}")
        if self.tp_size < 1 or self.pp_size < 1:
            raise ValueError("--tp-size and --pp-size must be at least 1")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must be in [0, 65535], got {self.port}")

    @property
    def num_encoders(self) -> int:
        """Encoder processes in all."""
        return self.tp_size * self.pp_size if self.mm_enable_dp_encoder else self.encoders

    def encoder(self, index: int) -> Spec:
        """The encoder of that index.

        On a GPU of the decoder's its forwards are short, so that decode steps come between them,
        and the decoder leaves memory for the tower, its rows and its graphs.
        """
        flags = ["--port", "0", *self._threads(self.encoder_args)]
        ranks = self.tp_size * self.pp_size
        if self.mm_enable_dp_encoder:
            flags += _unless(self.encoder_args, "--device", f"auto:{index}")
            flags += ("--shared-gpu", *_unless(self.encoder_args, "--max-batch-patches", "8192"))
        elif gpus := num_gpus(os.environ):  # beside the decoder's, as far as there are any
            flags += _unless(self.encoder_args, "--device", f"auto:{(ranks + index) % gpus}")
        flags += shlex.split(self.encoder_args)
        return self._spec(f"encoder-{index}", "encoder_svc", flags, 1)

    def decoder(self) -> Spec:
        """The decoder."""
        flags = ["--port", "0", *self._threads(self.decoder_args)]
        for flag, size in (("--tp-size", self.tp_size), ("--pp-size", self.pp_size)):
            flags += (flag, str(size)) if size > 1 else ()
        if self.mm_enable_dp_encoder:
            flags += _unless(self.decoder_args, "--mem-fraction-static", "0.8")
        return self._spec("decoder", "decoder_svc", (*flags, *shlex.split(self.decoder_args)), 1)

    def gateway(self, encoders: Sequence[str], decoders: Sequence[str]) -> Spec:
        """The gateway, in front of these addresses."""
        flags = ["--host", self.host, "--port", str(self.port), "--grpc-port", str(self.grpc_port)]
        flags += [f"--encoder-urls={','.join(encoders)}", f"--decoder-urls={','.join(decoders)}"]
        return self._spec("gateway", "gateway", (*flags, *shlex.split(self.gateway_args)), 0)

    def describe(self, env: Mapping[str, str]) -> str:
        """The effective settings of the three services as YAML, addresses yet unknown left out.

        Raises:
            ValueError, CycloptsError: Flags in `*_args` that cannot be.
        """
        specs = {
            "encoder": (EncoderConfig, self.encoder(0)),
            "decoder": (DecoderConfig, self.decoder()),
            "gateway": (GatewayConfig, self.gateway((), ())),
        }
        trees = {
            role: to_mapping(parse(config_class, role, spec.command[3:], env))
            for role, (config_class, spec) in specs.items()
        }
        return str(yaml.safe_dump(trees, sort_keys=False))

    def _threads(self, args: str) -> tuple[str, ...]:
        """Each process its share of the cores: torch would give all of them to everybody."""
        share = max(1, (os.cpu_count() or 1) // (self.num_encoders + 1))
        return _unless(args, "--num-threads", str(share))

    def _spec(self, name: str, module: str, flags: Sequence[str], stop_order: int) -> Spec:
        base = (sys.executable, "-m", module, "--model", self.model)
        usual = ("--drain-s", str(self.drain_s), "--log-level", self.log_level)
        pinned = {"address": "--port"} | ({"grpc": "--grpc-port"} if module == "gateway" else {})
        return Spec(name, (*base, *usual, *flags), pinned, stop_order)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the gateway listens, host:port; `grpc` may be empty."""

    rest: str
    grpc: str

    @property
    def url(self) -> str:
        """Root of the REST face."""
        return f"http://{self.rest}"


class Machine:
    """The services of one `Layout`, supervised. Leaving its async context ends them all."""

    def __init__(self, layout: Layout, relay: Relay) -> None:
        self._layout = layout
        self.supervisor = Supervisor(relay, stop_s=layout.drain_s + 5.0)

    async def __aenter__(self) -> Machine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.stop()

    async def start(self) -> Addresses:
        """Starts everything and returns once the gateway serves.

        Raises:
            CommandFailed: Something did not start; what did is ended on leaving the context.
        """
        _check_free(self._layout.host, self._layout.port)
        try:
            return await self._launch()
        except DidNotStart as error:
            raise CommandFailed(str(error)) from None

    async def _launch(self) -> Addresses:
        workers = [self._layout.encoder(index) for index in range(self._layout.num_encoders)]
        specs = (*workers, self._layout.decoder())
        launches = [asyncio.create_task(self.supervisor.launch(spec)) for spec in specs]
        try:
            results = await asyncio.gather(*launches)
        except DidNotStart:
            await self.supervisor.stop()  # then the launches that still wait fail by themselves
            await asyncio.gather(*launches, return_exceptions=True)
            raise
        *encoders, decoder = (ready["address"] for ready in results)
        ready = await self.supervisor.launch(self._layout.gateway(encoders, [decoder]))
        return Addresses(ready["address"], ready.get("grpc", ""))


def _unless(args: str, flag: str, value: str) -> tuple[str, ...]:
    """A flag of ours, unless the user's own text has it."""
    return () if flag in args else (flag, value)


def num_gpus(env: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """GPUs that processes started from here will see, found without CUDA."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(list(devices.glob("nvidia[0-9]*")))


def _check_free(host: str, port: int) -> None:
    """Says so before anything is started that the port is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CommandFailed(f"cannot listen on {host}:{port}: {error.strerror}") from None
