"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass, field

from chiasm.config.bounds import check_not_negative, check_positive
from chiasm.config.choice import check_choice
from chiasm.config.server import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """What media may be fetched and how large they may be."""

    allowed_media_domains: tuple[str, ...] = ()
    """Hosts media may be fetched from; empty = any public address."""
    allow_private_media: bool = False
    """Also fetch from private, loopback and link-local addresses (tests, closed networks)."""
    allowed_local_media_path: str = ""
    """Root below which file: URLs are read; empty = none."""
    max_redirects: int = 3
    """Redirects followed, each hop checked again."""
    fetch_timeout_s: float = 20.0
    """Seconds for one medium, all hops."""
    connect_timeout_s: float = 5.0
    """Seconds for one connection."""
    max_image_bytes: int = 33554432
    """Bytes of one picture's file."""
    max_video_bytes: int = 268435456
    """Bytes of one clip's file."""
    max_image_pixels: int = 67108864
    """Pixels of one picture, or of one frame of a clip, as stored."""
    max_decode_bytes: int = 1073741824
    """Memory one picture may take to decode, reckoned from its header; also all that are being
    decoded at once, times the number of encoders. More wait."""
    max_request_pixels: int = 268435456
    """Pixels of one request after resizing, all its pictures and frames together."""
    max_items: int = 32
    """Pictures and clips of one request."""
    limit_mm_per_prompt: tuple[str, ...] = ()
    """Per kind, as image=N or video=N."""
    max_bytes_in_flight: int = 2147483648
    """Bytes of media held for all requests together."""

    def __post_init__(self) -> None:
        check_not_negative(self, "max_redirects", "max_items")
        check_positive(
            self,
            "fetch_timeout_s",
            "connect_timeout_s",
            "max_image_bytes",
            "max_video_bytes",
            "max_image_pixels",
            "max_decode_bytes",
            "max_request_pixels",
            "max_bytes_in_flight",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """How much the gateway takes in."""

    max_inflight: int = 1024
    """Requests inside, of them three quarters with media at most; more wait their turn."""
    max_queued: int = 1024
    """Requests that wait for their turn, or for a service that is full; more get 429."""
    queue_timeout_s: float = 30.0
    """Seconds a request waits before it gets 429."""
    max_body_bytes: int = 536870912
    """Bytes of one request body."""
    request_timeout_s: float = 600.0
    """Deadline of one request, seconds."""

    def __post_init__(self) -> None:
        check_positive(self, "max_inflight", "max_body_bytes", "request_timeout_s")
        check_not_negative(self, "max_queued", "queue_timeout_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """How encoders are chosen."""

    hedge_after_s: float = 0.0
    """Seconds until a medium without rows goes to a second encoder too; 0 = never."""

    def __post_init__(self) -> None:
        check_not_negative(self, "hedge_after_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """Who may knock: TLS of the REST and the gRPC port, on which users come."""

    front_door: str = "auto"
    """plain, tls (shows a certificate), required (also asks for one) or auto: required where there
    is a CA, the peers' or its own, tls with a certificate alone, else plain."""
    front_cert_file: str = ""
    """PEM file of the certificate shown to users; empty = the one shown to peers."""
    front_key_file: str = ""
    """PEM file of its private key."""
    front_ca_file: str = ""
    """PEM file of the CA whose certificates get in; empty = the peers'."""

    def __post_init__(self) -> None:
        check_choice("--front-door", self.front_door, "auto", "plain", "tls", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The gateway: OpenAI REST and gRPC in, encoders and decoders out."""

    model: str
    """Checkpoint directory, or `demo`; only tokenizer, template and processor files are read."""
    server: ServerConfig = field(default_factory=lambda: ServerConfig(port=8000))
    front: FrontConfig = field(default_factory=FrontConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    grpc_port: int = 0
    """Port of the gRPC face; 0 takes a free one."""
    discovery: str = "static"
    """static, dns (names of headless services, looked up again and again) or kubernetes."""
    encoder_urls: tuple[str, ...] = ()
    """Encoders, host:port; dns: every address behind; kubernetes: service.namespace:port."""
    decoder_urls: tuple[str, ...] = ()
    """Decoders, likewise."""
    served_model_name: tuple[str, ...] = ()
    """Names requests may use; empty = the checkpoint directory's name."""
    api_key_file: str = ""
    """File of SHA-256 hex digests of API keys, one a line; empty = no keys asked for."""
    workers: int = 1
    """Gateway processes behind one address; they share all limits evenly."""
    parent_metrics: str = ""
    """Where the workers' metrics are summed, host:port; set by who starts them."""

    def __post_init__(self) -> None:
        check_choice("--discovery", self.discovery, "static", "dns", "kubernetes")
        check_positive(self, "workers")
