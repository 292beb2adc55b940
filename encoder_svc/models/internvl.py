"""The vision tower of InternVL 2.5, 3 and 3.5 (Chen et al. 2024): InternViT and its projector.

Every tile is a sequence of its own: a class token, then its patches. Patches come by merge cell, so
joining the four of a cell (the reference's pixel shuffle) is a change of view.
Shape suffixes: B tiles, N tokens, P patches of a tile, R rows, C hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiasm.plan import Grid
from encoder_svc.geometry import Geometry
from encoder_svc.layers.attention.base import SegmentAttention, Segments
from encoder_svc.layers.attention.registry import load_attention
from encoder_svc.layers.norm import LayerNorm, RMSNorm
from encoder_svc.layers.patch_embed import PatchEmbed
from encoder_svc.models.base import Place, VisionTower

_PROJECTOR_EPS = 1e-5  # the one norm whose epsilon no config names
_QK_EPS = 1e-6
_NORMS = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The tower's shape, from a checkpoint's config.json."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    geometry: Geometry
    norm: str
    eps: float
    qk_norm: bool
    qkv_bias: bool

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError("vision_config: hidden_size must be a multiple of its heads")

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> VisionConfig:
        """Reads config.json in either layout.

        Raises:
            ValueError: A field is missing, or asks for what this build lacks.
        """
        vision = config.get("vision_config") or {}
        text = config.get("text_config") or config.get("llm_config") or {}
        _refuse_unsupported(config, vision)
        try:
            return cls(
                depth=vision["num_hidden_layers"],
                hidden_size=vision["hidden_size"],
                intermediate_size=vision["intermediate_size"],
                num_heads=vision["num_attention_heads"],
                out_hidden_size=text["hidden_size"],
                geometry=_geometry(config, vision),
                norm=vision.get("norm_type", "layer_norm"),
                eps=float(vision.get("layer_norm_eps", 1e-6)),
                qk_norm=bool(vision.get("use_qk_norm", vision.get("qk_normalization", False))),
                qkv_bias=bool(vision.get("attention_bias", vision.get("qkv_bias", False))),
            )
        except KeyError as error:
            raise ValueError(f"vision_config: {error.args[0]} is missing") from None


class InternVisionTower(VisionTower):
    """See `VisionTower`."""

    family = "internvl"
    prefixes = (
        *("vision_tower.", "multi_modal_projector.", "vision_model.", "mlp1."),
        *("model.vision_tower.", "model.multi_modal_projector."),
    )
    levels = 1

    def __init__(self, config: VisionConfig, *, attention: str = "fused") -> None:
        super().__init__()
        self.config = config
        self.geometry = config.geometry
        self.hidden_size = config.out_hidden_size
        size, patches = config.hidden_size, config.geometry.tile**2
        backend = load_attention(attention)
        self.patch_embed = PatchEmbed(config.geometry, size)
        self.class_token = nn.Parameter(torch.empty(1, 1, size))
        self.positions = nn.Parameter(torch.empty(1, 1 + patches, size))
        self.blocks = nn.ModuleList(Block(config, backend) for _ in range(config.depth))
        self.projector = Projector(config)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> InternVisionTower:
        """See `VisionTower`."""
        return cls(VisionConfig.from_hf(config))

    @classmethod
    def place_of(cls, stored: str) -> Place | None:
        """See `VisionTower`: both layouts' names to ours."""
        for pattern, name, part, of in _NAMES:
            if match := pattern.fullmatch(stored):
                return Place(match.expand(name), part, of)
        return None

    def finish(self) -> None:
        """Positions are learned row by row; patches arrive cell by cell."""
        side, merge = self.geometry.tile, self.geometry.merge
        grid = self.positions.data[:, 1:].unflatten(1, (side // merge, merge, side // merge, merge))
        by_cell = grid.transpose(2, 3).flatten(1, 4)
        self.positions.data = torch.cat((self.positions.data[:, :1], by_cell), dim=1)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """See `VisionTower`."""
        x_BPC = self.patch_embed(patches).unflatten(0, (-1, self.geometry.tile**2))
        tiles = len(x_BPC)
        x_BNC = torch.cat((self.class_token.expand(tiles, -1, -1), x_BPC), dim=1) + self.positions
        if x_BNC.dtype is torch.float16:
            x_BNC = x_BNC.float()  # the residual stream may outgrow float16
        length = x_BNC.shape[1]
        segments = Segments.alike(tiles, length, patches.device)
        x_NC = x_BNC.flatten(0, 1)
        for block in self.blocks:
            x_NC = block(x_NC, segments)
        rows: Tensor = self.projector(x_NC.unflatten(0, (tiles, length))[:, 1:])
        return rows


class Attention(nn.Module):
    """Multi-head attention within tiles; queries and keys may be normalised over all heads."""

    def __init__(self, config: VisionConfig, backend: SegmentAttention) -> None:
        super().__init__()
        size = config.hidden_size
        self.qkv = nn.Linear(size, 3 * size, bias=config.qkv_bias)
        self.proj = nn.Linear(size, size)
        self.q_norm = RMSNorm(size, eps=_QK_EPS) if config.qk_norm else None
        self.k_norm = RMSNorm(size, eps=_QK_EPS) if config.qk_norm else None
        self._heads = (3, config.num_heads, size // config.num_heads)
        self._attend = backend

    def forward(self, x_NC: Tensor, segments: Segments) -> Tensor:
        """Returns [N, C]."""
        joined = self.qkv(x_NC)
        if self.q_norm is not None and self.k_norm is not None:
            q_NC, k_NC, v_NC = joined.chunk(3, dim=-1)
            joined = torch.cat((self.q_norm(q_NC), self.k_norm(k_NC), v_NC), dim=-1)
        out: Tensor = self.proj(self._attend(joined.unflatten(-1, self._heads), None, segments))
        return out


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each scaled channel by channel before it is added."""

    def __init__(self, config: VisionConfig, backend: SegmentAttention) -> None:
        super().__init__()
        size, norm = config.hidden_size, _NORMS[config.norm]
        self.norm1 = norm(size, eps=config.eps)
        self.norm2 = norm(size, eps=config.eps)
        self.attn = Attention(config, backend)
        self.fc1 = nn.Linear(size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, size)
        self.scale1 = nn.Parameter(torch.empty(size))
        self.scale2 = nn.Parameter(torch.empty(size))

    def forward(self, x_NC: Tensor, segments: Segments) -> Tensor:
        """Returns [N, C]."""
        x_NC = x_NC + self.scale1 * self.attn(self.norm1(x_NC), segments)
        mixed = self.fc2(F.gelu(self.fc1(self.norm2(x_NC))))
        out: Tensor = x_NC + self.scale2 * mixed
        return out


class Projector(nn.Module):
    """Joins the patches of a merge cell into one row of the language model's width."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._joined = config.hidden_size * config.geometry.merge**2
        self.norm = LayerNorm(self._joined, eps=_PROJECTOR_EPS)
        self.fc1 = nn.Linear(self._joined, config.out_hidden_size)
        self.fc2 = nn.Linear(config.out_hidden_size, config.out_hidden_size)

    def forward(self, x_BPC: Tensor) -> Tensor:
        """[B, P, C] to [R, out_hidden_size]."""
        x_RC = x_BPC.reshape(-1, self._joined)
        out: Tensor = self.fc2(F.gelu(self.fc1(self.norm(x_RC))))
        return out


def _geometry(config: dict[str, Any], vision: dict[str, Any]) -> Geometry:
    sizes = {}
    for key in ("image_size", "patch_size"):
        value = vision[key]
        pair = tuple(value) if isinstance(value, list | tuple) else (value, value)
        if pair[0] != pair[1]:
            raise ValueError(f"vision_config: {key} {pair} is no square")
        sizes[key] = int(pair[0])
    return Geometry(
        patch=sizes["patch_size"],
        temporal_patch=1,
        merge=round(1 / float(config.get("downsample_ratio", 0.5))),
        channels=int(vision.get("num_channels", 3)),
        tile=sizes["image_size"] // sizes["patch_size"],
    )


def _refuse_unsupported(config: dict[str, Any], vision: dict[str, Any]) -> None:
    wanted = {
        "ps_version": (config.get("ps_version", "v2"), "v2"),
        "select_layer": (config.get("select_layer", -1), -1),
        "vision_feature_layer": (config.get("vision_feature_layer", -1), -1),
        "projector_hidden_act": (config.get("projector_hidden_act", "gelu"), "gelu"),
        "vision_config.hidden_act": (vision.get("hidden_act", "gelu"), "gelu"),
        "vision_config.use_mean_pooling": (vision.get("use_mean_pooling", True), True),
    }
    for key, (found, known) in wanted.items():
        if found != known:
            raise ValueError(f"config.json: {key} {found!r} is not supported; known: {known!r}")
    if vision.get("norm_type", "layer_norm") not in _NORMS:
        raise ValueError(f"vision_config: norm_type {vision['norm_type']!r} is not supported")


def _names() -> list[tuple[re.Pattern[str], str, int, int]]:
    """Patterns of stored names, ours, and which of how many parts of ours the tensor is."""
    tower, block = r"(?:model\.)?vision_(?:tower|model)\.", r"encoder\.layers?\.(\d+)\."
    kind = r"(weight|bias)"
    found = [
        (rf"{tower}embeddings\.(?:cls_token|class_embedding)", "class_token"),
        (rf"{tower}embeddings\.position_embeddings?", "positions"),
        (
            rf"{tower}embeddings\.patch_(?:embeddings\.projection|embedding)\.{kind}",
            r"patch_embed.proj.\1",
        ),
        (
            rf"{tower}{block}(?:attention|attn)\.([qk])_norm\.weight",
            r"blocks.\1.attn.\2_norm.weight",
        ),
        (rf"{tower}{block}attn\.qkv\.{kind}", r"blocks.\1.attn.qkv.\2"),
        (
            rf"{tower}{block}(?:attention\.projection_layer|attn\.proj)\.{kind}",
            r"blocks.\1.attn.proj.\2",
        ),
        (rf"{tower}{block}mlp\.(fc[12])\.{kind}", r"blocks.\1.\2.\3"),
    ]
    for number, word in ((1, "before"), (2, "after")):
        found += [
            (
                rf"{tower}{block}(?:layernorm_{word}|norm{number})\.{kind}",
                rf"blocks.\1.norm{number}.\2",
            ),
            (rf"{tower}{block}(?:lambda_|ls){number}", rf"blocks.\1.scale{number}"),
        ]
    for hf, own, ours in (
        ("layer_norm", 0, "norm"),
        ("linear_1", 1, "fc1"),
        ("linear_2", 3, "fc2"),
    ):
        stored = rf"(?:(?:model\.)?multi_modal_projector\.{hf}|mlp1\.{own})\.{kind}"
        found.append((stored, rf"projector.{ours}.\1"))
    whole = [(re.compile(stored), ours, 0, 1) for stored, ours in found]
    parts = [
        (
            re.compile(rf"{tower}{block}attention\.{part}_proj\.{kind}"),
            r"blocks.\1.attn.qkv.\2",
            i,
            3,
        )
        for i, part in enumerate("qkv")
    ]
    return whole + parts


_NAMES = _names()
