"""`python -m decoder_svc`."""

from chiasm.cli.service import run_service
from chiasm.config import DecoderConfig

run_service(DecoderConfig, "decoder_svc.app:main")
