"""`python -m chiasm.probe`: whether the service of this container is well, for HEALTHCHECK.

Reads the variables that the service itself reads. Kubernetes does not need it: its probes ask the
ports themselves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from urllib.error import URLError
from urllib.request import urlopen

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chiasm.server import LIVE

_TIMEOUT_S = 4.0


def is_live(role: str, env: Mapping[str, str]) -> bool:
    """Asks on this host; a service that is loading or draining is not live yet, or no more.

    Args:
        role: gateway, or another: encoders and decoders are asked alike.
        env: CHIASM_PORT, and CHIASM_HEALTH_PORT where the other takes only peers.
    """
    port = env.get("CHIASM_PORT", "8000")
    if role == "gateway":
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=_TIMEOUT_S) as reply:
                return bool(reply.status == 200)
        except (URLError, OSError):
            return False
    address = f"127.0.0.1:{env.get('CHIASM_HEALTH_PORT') or port}"
    with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=LIVE)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(0 if is_live(sys.argv[1], os.environ) else 1)
