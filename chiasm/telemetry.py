"""The only place where metrics are declared, one class a service, each with its own registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from chiasm.quick_histogram import QuickHistogram

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)


class GatewayMetrics:
    """What users feel."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.requests = Counter(
            "chiasm_requests", "Requests by outcome", ("code",), registry=self.registry
        )
        self.ttft = Histogram(
            "chiasm_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            ("kind",),  # text | media
            buckets=_LATENCY,
            registry=self.registry,
        )
        self.inter_token_latency = QuickHistogram(
            "chiasm_inter_token_latency_seconds",
            "Between tokens of a stream",
            buckets=_TOKEN,
            registry=self.registry,
        )
        self.e2e = Histogram(
            "chiasm_e2e_request_latency_seconds",
            "From arrival to the last token",
            buckets=_LATENCY,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "chiasm_prompt_tokens", "Prompt tokens, media included", registry=self.registry
        )
        self.generation_tokens = Counter(
            "chiasm_generation_tokens", "Tokens generated", registry=self.registry
        )
        self.embedding_lost = Counter(
            "chiasm_embedding_lost",
            "Parts whose rows had to be had elsewhere, by cause",
            ("cause",),
            registry=self.registry,
        )
        self.migrations = Counter(
            "chiasm_request_migrations", "Requests moved elsewhere", registry=self.registry
        )
        self.encode_moves = Counter(
            "chiasm_encode_moves",
            "Media, or runs of clips, encoded again, by the error that made it necessary",
            ("code",),
            registry=self.registry,
        )
        self.hedges = Counter(
            "chiasm_encode_hedges",
            "Slow encodes sent to a second encoder, and how many it won",
            ("event",),  # sent | won
            registry=self.registry,
        )
        self._declare_gauges()

    def _declare_gauges(self) -> None:
        self.inflight = Gauge(
            "chiasm_num_requests_running", "Requests inside the gateway", registry=self.registry
        )
        self.queued = Gauge(
            "chiasm_num_requests_waiting",
            "Requests that wait for a slot or for a service that is full",
            registry=self.registry,
        )
        self.tasks = Gauge(
            "chiasm_gateway_tasks", "Tasks on the event loop", registry=self.registry
        )
        self.media_bytes = Gauge(
            "chiasm_media_bytes", "Media held for requests in flight", registry=self.registry
        )


class TransferMetrics:
    """Rows on their way out of an encoder."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "chiasm_encoder_transfer_seconds",
            "Grant to Written, one segment",
            buckets=_LATENCY,
            registry=registry,
        )
        self.nbytes = Counter(
            "chiasm_encoder_transfer_bytes",
            "Bytes of rows sent, by the memory written: DRAM or VRAM (nixl), or stream (grpc)",
            ("memory",),
            registry=registry,
        )
        self.unwritten = Counter(
            "chiasm_encoder_unwritten_grants",
            "Grants of a decoder's memory that nixl could not write; they travelled over grpc",
            registry=registry,
        )


class EncoderMetrics:
    """The encoder's own signals; `pending_patches` is what it is scaled on."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.requests = Counter(
            "chiasm_encoder_requests",
            "Encode calls by outcome",
            ("outcome",),
            registry=self.registry,
        )
        self.queue_wait = Histogram(
            "chiasm_encoder_queue_wait_seconds",
            "Waiting to be preprocessed, and for the tower",
            buckets=_LATENCY,
            registry=self.registry,
        )
        self.preprocess = Histogram(
            "chiasm_encoder_preprocess_seconds",
            "Bytes to patches",
            buckets=_LATENCY,
            registry=self.registry,
        )
        self.forward = Histogram(
            "chiasm_encoder_model_forward_seconds",
            "One batch through the tower",
            buckets=_LATENCY,
            registry=self.registry,
        )
        self.transfers = TransferMetrics(self.registry)
        self.pending_patches = Gauge(
            "chiasm_encoder_pending_patches", "Patches waiting or running", registry=self.registry
        )
        self.cache_bytes = Gauge(
            "chiasm_encoder_cache_bytes", "Bytes of rows held", registry=self.registry
        )
        self.held_bytes = Gauge(
            "chiasm_encoder_held_bytes",
            "Bytes of rows that an open stream is interested in; 0 at rest",
            registry=self.registry,
        )
        self.open_encodes = Gauge(
            "chiasm_encoder_open_encodes", "Encode streams", registry=self.registry
        )
        self.open_fetches = Gauge(
            "chiasm_encoder_open_fetches", "Fetch streams", registry=self.registry
        )
        self.cache_queries = Counter(
            "chiasm_encoder_cache_queries", "Items looked up", registry=self.registry
        )
        self.cache_hits = Counter(
            "chiasm_encoder_cache_hits", "Items found or joined", registry=self.registry
        )


class DecoderMetrics:
    """The decoder's own signals."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.running = Gauge(
            "chiasm_num_requests_running", "Requests in the batch", registry=self.registry
        )
        self.waiting = Gauge(
            "chiasm_num_requests_waiting", "Requests not yet in it", registry=self.registry
        )
        self.waiting_tokens = Gauge(
            "chiasm_waiting_tokens", "Prompt tokens not yet prefilled", registry=self.registry
        )
        self.kv_usage = Gauge(
            "chiasm_kv_cache_usage_ratio", "Pages held over pages in all", registry=self.registry
        )
        self.prefix_queries = Counter(
            "chiasm_prefix_cache_queries", "Prompt tokens looked up", registry=self.registry
        )
        self.prefix_hits = Counter(
            "chiasm_prefix_cache_hits", "Prompt tokens found", registry=self.registry
        )
        self.prompt_tokens = Counter(
            "chiasm_prompt_tokens", "Prompt tokens", registry=self.registry
        )
        self.generation_tokens = Counter(
            "chiasm_generation_tokens", "Tokens sampled", registry=self.registry
        )
        self.preemptions = Counter(
            "chiasm_preemptions", "Requests preempted because pages ran out", registry=self.registry
        )
        self.embedding_lost = Counter(
            "chiasm_embedding_lost", "Parts lost, by cause", ("cause",), registry=self.registry
        )
        self.fetch_dropped_chunks = Counter(
            "chiasm_fetch_dropped_chunks",
            "Chunks of rows that no grant had asked for",
            registry=self.registry,
        )
        self.agent_renewals = Counter(
            "chiasm_transfer_agent_renewals", "Writers lost in mid-write", registry=self.registry
        )
        self.stale_attempts = Counter(
            "chiasm_stale_attempts",
            "Redirects and second sources of an attempt that was over",
            registry=self.registry,
        )
        self.slab_pages_held = Gauge(
            "chiasm_slab_pages_held", "Pages of the embedding slab in use", registry=self.registry
        )
        self.step_failures = Counter(
            "chiasm_step_failures", "Steps that raised, lost ranks included", registry=self.registry
        )
        self.nonfinite_logits = Counter(
            "chiasm_nonfinite_logits",
            "Requests failed because the model produced NaN or infinity",
            registry=self.registry,
        )
        self.step_time = Histogram(
            "chiasm_step_seconds", "One engine step", buckets=_TOKEN, registry=self.registry
        )
