"""Settings of encoder_svc."""

from __future__ import annotations

from dataclasses import dataclass, field

from chiasm.config.bounds import check_not_negative, check_positive
from chiasm.config.choice import check_choice
from chiasm.config.server import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """One encoder replica: the vision tower, data parallel."""

    model: str
    """Checkpoint directory, or `demo`."""
    server: ServerConfig = field(default_factory=ServerConfig)
    dp_size: int = 1
    """Worker processes, each with its own GPU, cache and port; `port` lists them if more than 1."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto. Worker i of several takes cuda:i where there are GPUs."""
    shared_gpu: bool = False
    """A decoder works on the same GPU: under NVIDIA MPS, its steps go before our forwards."""
    dtype: str = "auto"
    """Weights, arithmetic: float32, bfloat16, float16; auto = bfloat16 on cuda, float32 on cpu."""
    row_dtype: str = "auto"
    """Dtype of rows on the wire; auto = dtype. Must equal the decoder's."""
    transport: str = "auto"
    """auto, nixl or grpc."""
    max_batch_patches: int = 16384
    """Patches in one forward, over all items of a batch (one larger item runs alone)."""
    max_item_patches: int = 262144
    """Patches of one item; more is refused."""
    max_pending_patches: int = 1048576
    """Patches waiting or running before new work is refused with RESOURCE_EXHAUSTED."""
    max_media_bytes: int = 268435456
    """Bytes of one medium."""
    cache_bytes: int = 1073741824
    """Rows kept, in bytes: in flight and finished together."""
    host_cache_bytes: int = 0
    """Pinned host memory for finished rows that a GPU has no room for any more; 0 = none."""
    segment_rows: int = 4096
    """Most rows of one segment (of a clip, and of a very large picture)."""
    preprocess_workers: int = 2
    """Threads that decode, resize and patchify."""
    num_threads: int = 0
    """Torch threads; 0 = torch's default, of several workers each its share of the cores."""
    fetch_grace_s: float = 5.0
    """How long a Fetch that arrives before its Encode may wait."""
    digest: str = "sampled"
    """sampled (64 KiB of every tensor) or full."""

    def __post_init__(self) -> None:
        check_positive(
            self,
            "dp_size",
            "max_batch_patches",
            "max_item_patches",
            "max_pending_patches",
            "max_media_bytes",
            "cache_bytes",
            "segment_rows",
            "preprocess_workers",
        )
        check_not_negative(self, "host_cache_bytes", "num_threads", "fetch_grace_s")
        if self.dp_size > 1 and ":" in self.device:
            raise ValueError(f"--dp-size {self.dp_size}: --device {self.device!r} is one device")
        check_choice("--transport", self.transport, "auto", "nixl", "grpc")
        check_choice("--digest", self.digest, "sampled", "full")
