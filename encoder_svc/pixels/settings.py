"""How pixels become numbers: the checkpoint's processor files, read by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from chiasm.json_file import read_json
from encoder_svc.geometry import Geometry

# Published constants of OpenAI's CLIP, the family's default.
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class PixelSettings:
    """One modality's arithmetic: `(value * rescale_factor - mean) / std` after a resize."""

    geometry: Geometry
    rescale_factor: float = 1 / 255
    mean: tuple[float, ...] = _CLIP_MEAN
    std: tuple[float, ...] = _CLIP_STD
    resample: Image.Resampling = Image.Resampling.BICUBIC

    @classmethod
    def from_hf(cls, config: dict[str, Any], geometry: Geometry | None = None) -> PixelSettings:
        """Reads a preprocessor_config.json.

        Args:
            config: The file.
            geometry: The cells, where the file does not say them.

        Raises:
            ValueError: It asks for what this build cannot obey.
        """
        for flag in ("do_resize", "do_convert_rgb"):
            if not config.get(flag, True):
                raise ValueError(f"preprocessor config: {flag}=false is not supported")
        geometry = geometry or Geometry(
            patch=int(config.get("patch_size", 14)),
            temporal_patch=int(config.get("temporal_patch_size", 2)),
            merge=int(config.get("merge_size", 2)),
        )
        rescale = config.get("do_rescale", True)
        normalize = config.get("do_normalize", True)
        return cls(
            geometry=geometry,
            rescale_factor=float(config.get("rescale_factor", 1 / 255)) if rescale else 1.0,
            mean=_triple(config, "image_mean", _CLIP_MEAN) if normalize else (0.0, 0.0, 0.0),
            std=_triple(config, "image_std", _CLIP_STD) if normalize else (1.0, 1.0, 1.0),
            resample=Image.Resampling(config.get("resample", Image.Resampling.BICUBIC)),
        )


def read_settings(
    model_dir: Path, tower: Geometry | None = None
) -> tuple[PixelSettings, PixelSettings]:
    """Settings for pictures and for clips; a clip's fall back to the picture's.

    Args:
        model_dir: The checkpoint.
        tower: The tower's cells; those of the files count, unless pictures are cut into tiles.

    Raises:
        ValueError: A file that is missing, broken, or asks for the unsupported.
    """
    image = read_json(model_dir / "preprocessor_config.json")
    video = read_json(model_dir / "video_preprocessor_config.json", optional=True)
    cells = tower if tower is not None and tower.tile else None
    return PixelSettings.from_hf(image, cells), PixelSettings.from_hf(video or image, cells)


def _triple(config: dict[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    values = tuple(float(v) for v in config.get(key) or default)
    if len(values) != len(default):
        raise ValueError(f"preprocessor config: {key} needs {len(default)} values")
    return values
