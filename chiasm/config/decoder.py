"""Settings of decoder_svc."""

from __future__ import annotations

from dataclasses import dataclass, field

from chiasm.config.bounds import check_not_negative, check_positive
from chiasm.config.choice import check_choice
from chiasm.config.server import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the language model is laid over ranks."""

    tp_size: int = 1
    """Tensor parallel ranks."""
    pp_size: int = 1
    """Pipeline stages."""
    ep_size: int = 1
    """Groups of tensor parallel ranks that a mixture's experts are spread over; divides tp_size."""
    rank_token_file: str = ""
    """File with the secret by which ranks of other hosts are known; needed for several hosts."""

    def __post_init__(self) -> None:
        check_positive(self, "tp_size", "pp_size", "ep_size")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp_size * self.pp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Budgets of one step."""

    max_running_requests: int = 256
    """Sequences that decode at once."""
    max_waiting_requests: int = 1024
    """Requests that may wait before new ones are refused with RESOURCE_EXHAUSTED."""
    max_waiting_tokens: int = 0
    """Prompt tokens of waiting requests, likewise; 0 = eight times what the KV pages hold."""
    max_waiting_embedding_bytes: int = 0
    """Rows of media that have not landed, likewise; 0 = eight times the slab."""
    chunked_prefill_size: int = 2048
    """Prompt tokens of one step, over all requests."""
    max_mixed_tokens: int = 1536
    """Tokens of a step that sequences also decode in, which holds their pace; 0 = no such limit."""
    max_prefill_delay: int = 4
    """Steps that prompts may wait to share one, while more requests wait than find a place."""
    prefix_cache: bool = True
    """Keep the pages of finished prompts for requests that begin the same way."""
    async_scheduling: str = "auto"
    """Plan a step while the one before runs: on, off; auto = on with cuda."""

    def __post_init__(self) -> None:
        check_choice("--async-scheduling", self.async_scheduling, "auto", "on", "off")
        check_positive(self, "max_running_requests", "chunked_prefill_size")
        check_not_negative(
            self,
            "max_waiting_requests",
            "max_waiting_tokens",
            "max_waiting_embedding_bytes",
            "max_mixed_tokens",
            "max_prefill_delay",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """Pages of K and V, and pages of the slab that embedding rows land in."""

    block_size: int = 16
    """Tokens of one KV page."""
    kv_blocks: int = 0
    """KV pages; 0 = from mem_fraction_static on cuda, from kv_bytes on cpu."""
    kv_bytes: int = 1073741824
    """Bytes of KV pages on cpu, all layers."""
    mem_fraction_static: float = 0.88
    """Share of GPU memory for weights and KV pages."""
    slab_bytes: int = 268435456
    """Bytes of the slab that embedding rows land in."""
    slab_page_rows: int = 64
    """Rows of one page of the slab."""
    slab_memory: str = "auto"
    """device: nixl may also write rows into the first rank's memory; host: not; auto: on cuda."""

    def __post_init__(self) -> None:
        check_positive(self, "block_size", "slab_page_rows", "slab_bytes")
        check_choice("--slab-memory", self.slab_memory, "auto", "host", "device")
        if not 0 < self.mem_fraction_static < 1:
            raise ValueError("--mem-fraction-static must be between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """One decoder replica: the language model, pipeline x tensor parallel."""

    model: str
    """Checkpoint directory, or `demo`."""
    server: ServerConfig = field(default_factory=ServerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto."""
    dtype: str = "auto"
    """Weights, arithmetic: float32, bfloat16, float16; auto = bfloat16 on cuda, float32 on cpu."""
    row_dtype: str = "auto"
    """Dtype of rows on the wire; auto = dtype. Must equal the encoder's."""
    attention_backend: str = "auto"
    """flashinfer or reference; auto = flashinfer with cuda where it is installed."""
    cuda_graphs: bool = True
    """Record decode steps as CUDA graphs, where the attention backend allows it."""
    load_format: str = "auto"
    """auto = the checkpoint's weights; dummy = random weights, for measuring speed."""
    fp8_matmul: bool = False
    """Keep FP8 weights of dense layers in 8 bits and multiply them so, on GPUs that can (capability
    8.9); else they are multiplied out as they are read. Its kernels are tested on a GPU, a whole
    model is not yet."""
    transport: str = "auto"
    """auto, nixl or grpc."""
    max_model_len: int = 0
    """Most tokens of prompt and answer; 0 = the checkpoint's."""
    embedding_timeout_s: float = 120.0
    """How long a request waits for rows before it is failed."""
    num_threads: int = 0
    """Torch threads; 0 = torch's default."""
    digest: str = "sampled"
    """sampled (64 KiB of every tensor) or full."""

    def __post_init__(self) -> None:
        check_not_negative(self, "max_model_len", "num_threads")
        check_positive(self, "embedding_timeout_s")
        backend = self.attention_backend
        check_choice("--attention-backend", backend, "auto", "flashinfer", "reference")
        check_choice("--load-format", self.load_format, "auto", "dummy")
        check_choice("--transport", self.transport, "auto", "nixl", "grpc")
        check_choice("--digest", self.digest, "sampled", "full")
