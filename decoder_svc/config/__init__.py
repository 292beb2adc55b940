"""What a checkpoint says about its language model, as a frozen value."""

from decoder_svc.config.from_hf import TextConfig, from_hf, read_text_config

__all__ = ["TextConfig", "from_hf", "read_text_config"]
