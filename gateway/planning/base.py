"""What a family's planner is, and what it decides about one medium."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chiasm.plan import Grid, MediaPlan, Modality
from gateway.media.header import MediaHeader
from gateway.messages import MediaOptions
from gateway.placeholders import Run, Script


@dataclass(frozen=True, slots=True)
class Layout:
    """A plan before its digest: everything that follows from a header and the options alone."""

    family: str
    header: MediaHeader
    resized_height: int
    resized_width: int
    grids: tuple[Grid, ...]
    num_rows: int
    frame_indices: tuple[int, ...] = ()
    seconds_per_grid: float = 0.0
    script: Script = ()
    """What stands in the prompt for the medium's one placeholder."""

    @property
    def runs(self) -> tuple[int, ...]:
        """Rows of every run of placeholders, in prompt order."""
        runs = tuple(piece.rows for piece in self.script if isinstance(piece, Run))
        return runs or (self.num_rows,)

    @property
    def pixels(self) -> int:
        """Pixels the tower sees, all frames."""
        return self.resized_height * self.resized_width * max(1, len(self.frame_indices))

    def to_plan(self, *, media_bytes: int) -> MediaPlan:
        """The plan as encoder and decoder get it, but for its digest."""
        header = self.header
        return MediaPlan(
            digest=b"",
            family=self.family,
            modality=header.modality,
            source_height=header.height,
            source_width=header.width,
            resized_height=self.resized_height,
            resized_width=self.resized_width,
            grids=self.grids,
            num_rows=self.num_rows,
            media_bytes=media_bytes,
            media_type=header.media_type,
            frame_indices=self.frame_indices,
            frame_timestamps_s=tuple(header.frame_times_s[i] for i in self.frame_indices),
            seconds_per_grid=self.seconds_per_grid,
        )


class Planner(ABC):
    """Plans one family's media as its reference processor would. Pure: headers in, layouts out."""

    family: str
    """The name that plans, towers and text models of the checkpoint carry."""

    @classmethod
    @abstractmethod
    def from_files(
        cls,
        *,
        image: Mapping[str, Any],
        video: Mapping[str, Any],
        config: Mapping[str, Any] | None = None,
    ) -> Planner:
        """From the JSON of the two processor files, either may be empty, and of config.json."""

    def plan(self, header: MediaHeader, options: MediaOptions, *, param: str) -> Layout:
        """Raises InvalidRequest for a medium this family cannot take."""
        image = header.modality is Modality.IMAGE
        plan = self.plan_image if image else self.plan_video
        return plan(header, options, param=param)

    @abstractmethod
    def plan_image(self, header: MediaHeader, options: MediaOptions, *, param: str) -> Layout:
        """One picture."""

    @abstractmethod
    def plan_video(self, header: MediaHeader, options: MediaOptions, *, param: str) -> Layout:
        """One clip."""
