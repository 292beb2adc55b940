"""Plans: sizes, frames, grids and rows of each medium. One file per model family."""

from gateway.planning.base import Layout, Planner
from gateway.planning.digest import Keys, media_digest, seal
from gateway.planning.registry import planner_for

__all__ = ["Keys", "Layout", "Planner", "media_digest", "planner_for", "seal"]
