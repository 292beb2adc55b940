"""`python -m gateway`."""

from chiasm.cli.service import run_service
from chiasm.config import GatewayConfig

run_service(GatewayConfig, "gateway.app:main")
