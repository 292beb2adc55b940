"""InternVL 2.5, 3 and 3.5, in the layout of their authors and in transformers' (-hf).

A picture becomes as many square tiles as its shape and size ask for, and a small whole of it beside
them; a frame of a clip is one tile. All tiles have equally many rows. In the plan the tiles of a
picture are what the frames of a clip are: temporal groups of one grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chiasm.plan import Grid
from gateway.media.header import MediaHeader
from gateway.messages import MediaOptions
from gateway.placeholders import Run
from gateway.planning.base import Layout, Planner

_ROW_TOKEN = "<IMG_CONTEXT>"


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSettings:
    """What decides about tiles; defaults are the family's published ones."""

    side: int = 448
    """Pixels along a tile."""
    patch_size: int = 14
    merge: int = 2
    """Patches along one side of a row."""
    min_tiles: int = 1
    max_tiles: int = 12
    thumbnail: bool = True
    num_frames: int = 8
    """Of a clip, when nobody asks for a rate."""
    max_frames: int = 512

    @property
    def grid_side(self) -> int:
        """Patches along a tile."""
        return self.side // self.patch_size

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return (self.grid_side // self.merge) ** 2


class InternVLPlanner(Planner):
    """Chooses tiles as the reference does."""

    family = "internvl"

    def __init__(self, settings: TileSettings) -> None:
        self._settings = settings

    @classmethod
    def from_files(
        cls,
        *,
        image: Mapping[str, Any],
        video: Mapping[str, Any],
        config: Mapping[str, Any] | None = None,
    ) -> InternVLPlanner:
        """See the base class. The authors' config.json says what -hf processor files say."""
        config = config or {}
        vision = config.get("vision_config") or {}
        tiled = config.get("dynamic_image_size", image.get("crop_to_patches", True))
        found = {
            "side": _first(vision.get("image_size")),
            "patch_size": _first(vision.get("patch_size")),
            "merge": round(1 / float(config.get("downsample_ratio", 0.5))),
            "min_tiles": config.get("min_dynamic_patch", image.get("min_patches")),
            "max_tiles": config.get("max_dynamic_patch", image.get("max_patches")),
            "thumbnail": config.get("use_thumbnail"),
            "num_frames": video.get("num_frames"),
        }
        if not tiled:
            found["max_tiles"] = 1
        return cls(TileSettings(**{key: value for key, value in found.items() if value}))

    def plan_image(self, header: MediaHeader, options: MediaOptions, *, param: str) -> Layout:
        """One picture: a group for each tile, and one for the thumbnail if there are several."""
        settings = self._settings
        most = settings.max_tiles
        if options.max_pixels is not None:
            most = max(settings.min_tiles, min(most, options.max_pixels // settings.side**2))
        columns, rows = choose_tiles(header, settings, most)
        tiles = columns * rows
        groups = tiles + (settings.thumbnail and tiles > 1)
        num_rows = groups * settings.rows
        return Layout(
            self.family,
            header,
            rows * settings.side,
            columns * settings.side,
            (Grid(groups, settings.grid_side, settings.grid_side),),
            num_rows,
            script=("<img>", Run(num_rows, _ROW_TOKEN), "</img>"),
        )

    def plan_video(self, header: MediaHeader, options: MediaOptions, *, param: str) -> Layout:
        """One clip: a group and a run of placeholders for each frame, numbered in the prompt."""
        settings = self._settings
        frames = choose_frames(header, settings, options)
        pieces: list[str | Run] = []
        for number, _ in enumerate(frames, 1):
            lead = f"{'' if number == 1 else chr(10)}Frame{number}: <img>"
            pieces += [lead, Run(settings.rows, _ROW_TOKEN), "</img>"]
        return Layout(
            self.family,
            header,
            settings.side,
            settings.side,
            (Grid(len(frames), settings.grid_side, settings.grid_side),),
            len(frames) * settings.rows,
            frame_indices=frames,
            script=tuple(pieces),
        )


def choose_tiles(header: MediaHeader, settings: TileSettings, most: int) -> tuple[int, int]:
    """Columns and rows, nearest the picture's shape; of equals the larger that it half fills."""
    shapes = sorted(
        (
            (columns, rows)
            for columns in range(1, most + 1)
            for rows in range(1, most + 1)
            if settings.min_tiles <= columns * rows <= most
        ),
        key=lambda shape: shape[0] * shape[1],
    )
    ratio, area = header.width / header.height, header.width * header.height
    best, nearest = (1, 1), float("inf")
    for columns, rows in shapes:
        distance = abs(ratio - columns / rows)
        filled = area > 0.5 * settings.side**2 * columns * rows
        if distance < nearest or (distance == nearest and filled):
            best, nearest = (columns, rows), distance
    return best


def choose_frames(
    header: MediaHeader, settings: TileSettings, options: MediaOptions
) -> tuple[int, ...]:
    """Frames from the middle of equal stretches; of a short clip all."""
    total = header.num_frames
    wanted = settings.num_frames
    if options.fps:
        wanted = max(1, int(header.duration_s * options.fps))
    wanted = min(wanted, options.max_frames or wanted, settings.max_frames, total)
    return tuple(int(total / wanted * (index + 0.5)) for index in range(wanted))


def _first(size: Any) -> int | None:
    """A size, or the first of two that are equal."""
    return int(size[0] if isinstance(size, list | tuple) else size) if size else None
