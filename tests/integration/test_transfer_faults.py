"""Each side killed, stopped and restarted in mid-transfer, over NIXL between processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import grpc
import pytest

from chiasm.plan import Source
from chiasm.v1 import encoder_pb2
from tests.integration.cluster import free_port
from tests.integration.transfer_ends import ROWS, run_decoder, run_encoder
from tests.unit.transfer.loopback import media_plan

ROUNDS = int(os.environ.get("CHIASM_FAULT_ROUNDS", "12"))
"""Each of the six faults comes equally often; the full measure is 200 a transport."""
FAULTS = ("kill encoder", "kill decoder", "stop encoder", "stop decoder", "none", "abort")
PATIENCE_S, REST_S = 120.0, 120.0
# A server that has imported everything forks the ends: a restart takes a fraction of a second.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.integration.transfer_ends"])


class Process:
    """One end, restarted when it has died."""

    def __init__(self, target, *args: object) -> None:
        self._target, self._args = target, args
        self.start()

    def start(self) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self.process: BaseProcess = CONTEXT.Process(
            target=self._target, args=(*self._args, theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        self.hello = hear(self.pipe, 240)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


class Pair:
    """An encoder and a decoder; `encode` is the gateway's part."""

    def __init__(self, tls: str) -> None:
        self.port = free_port()
        self.encoder = Process(run_encoder, self.port, tls)
        self.decoder = Process(run_decoder, tls)

    def encode(self, name: str) -> tuple[grpc.Channel, object, Source]:
        channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        encode_id = secrets.token_bytes(16)
        plan = media_plan(name, ROWS)
        start = encoder_pb2.EncodeStart(encode_id=encode_id, plan=plan.to_proto())
        done = threading.Event()

        def requests() -> Iterator[encoder_pb2.EncodeRequest]:
            yield encoder_pb2.EncodeRequest(start=start)
            yield encoder_pb2.EncodeRequest(chunk=b"media")
            done.wait()

        call = channel.stream_stream(
            "/chiasm.v1.Encoder/Encode",
            request_serializer=encoder_pb2.EncodeRequest.SerializeToString,
            response_deserializer=encoder_pb2.EncodeResponse.FromString,
        )(requests())
        call.add_callback(done.set)
        epoch = self.encoder.hello
        return channel, call, Source(encode_id, f"127.0.0.1:{self.port}", epoch)

    def end(self) -> None:
        for side in (self.encoder, self.decoder):
            side.end()


def hear(pipe: Connection, timeout_s: float):
    if not pipe.poll(timeout_s):
        raise TimeoutError("the other end does not answer")
    return pipe.recv()


@pytest.fixture(params=["", "tcp"], ids=["shared memory", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    it = Pair(request.param)
    yield it
    it.end()


def strike(pair: Pair, fault: str, draw: random.Random) -> str | None:
    """Does it; returns what the decoder says of the fetch, None when it is dead."""
    time.sleep(draw.choice((0.0, 0.002, 0.005, 0.01, 0.03)))
    side = pair.encoder if fault.endswith("encoder") else pair.decoder
    if fault.startswith("kill"):
        side.end()
        if side is pair.decoder:
            side.start()
            return None
        outcome = str(hear(pair.decoder.pipe, PATIENCE_S + 5))
        side.start()
        return outcome
    if fault.startswith("stop"):
        side.signal(signal.SIGSTOP)
        time.sleep(draw.uniform(0.05, 0.5))
        side.signal(signal.SIGCONT)
    return str(hear(pair.decoder.pipe, PATIENCE_S + 5))


def at_rest(pair: Pair) -> None:
    """No slot is held, at the latest so long after the fault; nor is anything at the encoder."""
    pair.decoder.pipe.send(("rest",))
    assert hear(pair.decoder.pipe, REST_S)[0] == "rest"
    deadline = time.monotonic() + REST_S
    while True:
        pair.encoder.pipe.send("state")
        if hear(pair.encoder.pipe, REST_S) == (0, 0, 0):
            return
        assert time.monotonic() < deadline, "the encoder holds something for ever"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_wrong_row_no_leak_no_stuck_slot(pair: Pair) -> None:
    draw = random.Random(5)
    faults = [FAULTS[i % len(FAULTS)] for i in range(ROUNDS)]
    draw.shuffle(faults)
    outcomes: dict[str, list[str | None]] = {fault: [] for fault in FAULTS}
    for number, fault in enumerate(faults):
        channel, call, source = pair.encode(f"item-{number}")
        patience_s = 0.004 if fault == "abort" else PATIENCE_S
        pair.decoder.pipe.send(("fetch", f"item-{number}", source, patience_s))
        outcomes[fault].append(strike(pair, fault, draw))
        call.cancel()
        channel.close()
        at_rest(pair)
        assert pair.decoder.process.is_alive() and pair.encoder.process.is_alive()
    for fault, told in outcomes.items():
        print(f"{fault}: {dict(Counter(told))}")
    # Only what somebody's death has hit is encoded again, and nothing that came after it.
    for fault in ("none", "stop encoder", "stop decoder"):
        assert set(outcomes[fault]) <= {"landed"}, outcomes
    assert set(outcomes["abort"]) <= {"landed", "late"}, outcomes
