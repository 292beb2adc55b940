"""What `chiasm check --model` says about a checkpoint: sizes, layouts, and whether splitting pays.

Reads config.json and the headers of the weight files, no weights. The estimates are explained in
docs/sizing.md; all of them are arithmetic, nothing is measured.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chiasm.checkpoint import read_config, weight_files
from chiasm.digest import is_tower_tensor
from chiasm.stages import layer_counts

GB = 1e9
_TP_SIZES, _PP_SIZES = (1, 2, 4, 8), (1, 2, 4)
_EMBEDDINGS = ("embed_tokens.weight", "tok_embeddings.weight")
_HEADS = ("lm_head.weight", "language_model.output.weight")
_WORKING_GB = 2.0  # activations, graphs and the runtime of a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a request is like, and the machine it meets."""

    gpus: int = 8
    gpu_gb: float = 141.0
    tflops: float = 400.0
    """What a GPU reaches in large matrix products."""
    bandwidth_gb: float = 3500.0
    """What it reads from its memory in a second."""
    batch: int = 32
    """Answers that are decoded at once."""
    picture_rows: int = 1024
    """Rows of all pictures of a request."""
    prompt_tokens: int = 300
    """Tokens of its text."""
    answer_tokens: int = 200


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that share the language model."""

    tp_size: int = 1
    """Tensor parallel ranks of the layout to look at."""
    pp_size: int = 1
    """Its pipeline stages."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A checkpoint in numbers."""

    family: str
    tower_bytes: int
    tower_parameters: int
    text_bytes: int
    text_parameters: int
    active_parameters: int
    """Of the language model, those that one token passes through."""
    vocabulary_bytes: int
    """Of the token embedding; of lm_head as well, which may be the same tensor."""
    tied: bool
    """lm_head is the token embedding; first and last stage hold one each."""
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    widths: tuple[int, ...]
    """Inner widths that tensor parallel ranks must divide."""
    deepstack: int
    merge: int

    @classmethod
    def of(cls, model_dir: Path) -> Facts:
        """Raises ValueError for a checkpoint that cannot be read."""
        config = read_config(model_dir)
        text = config.get("text_config") or config
        vision = config.get("vision_config") or {}
        sizes: dict[bool, list[int]] = {True: [0, 0], False: [0, 0]}
        experts, vocabulary, tied = 0, 0, True
        for name, parameters, size in _tensors(model_dir):
            entry = sizes[is_tower_tensor(name)]
            entry[0] += size
            entry[1] += parameters
            experts += parameters if ".experts." in name else 0
            vocabulary += size if name.endswith(_EMBEDDINGS) else 0
            tied = tied and not name.endswith(_HEADS)
        count = _count(text, "n_routed_experts", "num_experts", "num_local_experts")
        used = int(text.get("num_experts_per_tok") or 0)
        unused = experts - experts * used // count if count else 0
        heads = int(text["num_attention_heads"])
        return cls(
            family=str(config.get("model_type")),
            tower_bytes=sizes[True][0],
            tower_parameters=sizes[True][1],
            text_bytes=sizes[False][0],
            text_parameters=sizes[False][1],
            active_parameters=sizes[False][1] - unused,
            vocabulary_bytes=vocabulary,
            tied=tied,
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or text["hidden_size"] // heads),
            layers=int(text["num_hidden_layers"]),
            widths=_widths(text, count),
            deepstack=len(vision.get("deepstack_visual_indexes") or ()),
            merge=int(vision.get("spatial_merge_size", 2)),
        )

    def obstacle(self, tp_size: int, pp_size: int) -> str:
        """What cannot be laid out so; empty = nothing."""
        if self.heads % tp_size or (self.kv_heads % tp_size and tp_size % self.kv_heads):
            return f"{self.heads} heads over {self.kv_heads} KV heads do not divide by {tp_size}"
        for width in self.widths:
            if width % tp_size:
                return f"an inner width of {width} does not divide by {tp_size}"
        if self.layers < pp_size:
            return f"{self.layers} layers do not fill {pp_size} stages"
        first = self.stages(pp_size)[0]
        if first < self.deepstack:
            return f"the first stage has {first} of {self.deepstack} layers that take features in"
        return ""

    def stages(self, pp_size: int) -> list[int]:
        """Layers of each stage, as the decoder cuts them."""
        size = self.text_bytes / self.text_parameters
        vocabulary = self.vocabulary_bytes / size
        layers = self.active_parameters - vocabulary * (1 if self.tied else 2)
        return layer_counts(self.layers, pp_size, vocabulary * self.layers / max(layers, 1.0))

    def rank_gb(self, tp_size: int, pp_size: int) -> float:
        """Weights of the largest rank, and what it works with; pages of K and V come on top."""
        counts = self.stages(pp_size)
        once = self.vocabulary_bytes * (1 if self.tied else 2)
        layer = (self.text_bytes - once) / self.layers
        sizes = [count * layer for count in counts]
        sizes[0] += self.vocabulary_bytes
        sizes[-1] += self.vocabulary_bytes * (pp_size > 1 or not self.tied)
        return max(sizes) / tp_size / GB + _WORKING_GB

    def token_bytes(self, tp_size: int, pp_size: int) -> int:
        """K and V of one token on the largest rank, in two-byte numbers."""
        heads = -(-self.kv_heads // tp_size)
        return 4 * heads * self.head_dim * max(self.stages(pp_size))


@dataclass(frozen=True, slots=True)
class Split:
    """What splitting does to one kind of traffic."""

    encode_ms: float
    decode_ms: float
    """Prefill, and the request's share of decode steps."""
    share: float
    """Of a GPU's time, that pictures take when one process does everything."""
    encoders: int
    """GPUs of `Traffic.gpus` that encode when split."""
    throughput: float
    """Requests a second when split over those when not."""


def split_estimate(facts: Facts, traffic: Traffic) -> Split:
    """The formula of docs/sizing.md."""
    rate = traffic.tflops * 1e12
    patches = traffic.picture_rows * facts.merge**2
    encode_s = 2 * facts.tower_parameters * patches / rate
    tokens = traffic.picture_rows + traffic.prompt_tokens
    prefill_s = 2 * facts.active_parameters * tokens / rate
    step_s = facts.text_bytes / (traffic.bandwidth_gb * GB)
    decode_s = prefill_s + traffic.answer_tokens * step_s / traffic.batch
    gpus = traffic.gpus
    share = encode_s / (encode_s + decode_s)
    together = gpus / (encode_s + decode_s)
    apart = {count: min(count / encode_s, (gpus - count) / decode_s) for count in range(1, gpus)}
    best = max(apart, key=lambda count: apart[count]) if apart else 0
    gain = apart[best] / together if apart else 0.0
    return Split(encode_s * 1e3, decode_s * 1e3, share, best, gain)


def describe(model_dir: Path, traffic: Traffic, ranks: Ranks) -> Iterator[tuple[str, str]]:
    """Lines of the report: what, and what was found. Raises ValueError."""
    facts = Facts.of(model_dir)
    yield "family", facts.family
    yield "vision tower", _sizes(facts.tower_parameters, facts.tower_bytes)
    active = f", {facts.active_parameters / GB:.2f} B of them for a token"
    yield (
        "language model",
        _sizes(facts.text_parameters, facts.text_bytes)
        + (active if facts.active_parameters < facts.text_parameters else ""),
    )
    yield f"tp {ranks.tp_size} x pp {ranks.pp_size}", _laid_out(facts, traffic, ranks)
    fitting = []
    for one in (Ranks(tp, pp) for tp in _TP_SIZES for pp in _PP_SIZES):
        if not facts.obstacle(one.tp_size, one.pp_size):
            need = facts.rank_gb(one.tp_size, one.pp_size)
            if need < traffic.gpu_gb:
                told = _laid_out(facts, traffic, one)
                fitting.append(f"tp {one.tp_size} x pp {one.pp_size}: {told}")
    yield f"layouts on {traffic.gpu_gb:.0f} GB GPUs", "\n".join(fitting) or "none fits"
    split = split_estimate(facts, traffic)
    yield (
        f"split over {traffic.gpus} GPUs",
        f"pictures take {split.share:.0%} of a GPU's time ({split.encode_ms:.1f} of "
        f"{split.encode_ms + split.decode_ms:.1f} ms a request)\n"
        f"{split.encoders} encoding, {traffic.gpus - split.encoders} decoding: "
        f"{split.throughput:.0%} of the throughput of GPUs that do both, and no answer waits "
        f"{split.encode_ms:.1f} ms for somebody's pictures",
    )


def _laid_out(facts: Facts, traffic: Traffic, ranks: Ranks) -> str:
    tp_size, pp_size = ranks.tp_size, ranks.pp_size
    if reason := facts.obstacle(tp_size, pp_size):
        return f"cannot be: {reason}"
    need = facts.rank_gb(tp_size, pp_size)
    room = (traffic.gpu_gb - need) * GB / facts.token_bytes(tp_size, pp_size)
    if room <= 0:
        return f"{need:.1f} GB a rank, more than a GPU of {traffic.gpu_gb:.0f} GB has"
    return f"{need:.1f} GB a rank, {room / 1e3:.0f} k tokens of K and V"


def _sizes(parameters: int, size: int) -> str:
    return f"{parameters / GB:.3f} B parameters, {size / GB:.2f} GB"


def _count(text: dict[str, Any], *keys: str) -> int:
    return next((int(text[key]) for key in keys if text.get(key)), 0)


def _widths(text: dict[str, Any], experts: int) -> tuple[int, ...]:
    """With experts, theirs; dense layers beside them divide wherever these do."""
    key = "moe_intermediate_size" if experts else "intermediate_size"
    return (int(text[key]),)


def _tensors(model_dir: Path) -> Iterator[tuple[str, int, int]]:
    """Name, parameters and bytes of every tensor, from the files' headers."""
    for path in weight_files(model_dir):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                parameters = 1
                for side in entry["shape"]:
                    parameters *= side
                begin, end = entry["data_offsets"]
                yield name, parameters, end - begin
