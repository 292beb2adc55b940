"""`python -m encoder_svc`: one encoder worker."""

from chiasm.cli.service import run_service
from chiasm.config import EncoderConfig

run_service(EncoderConfig, "encoder_svc.app:main")
