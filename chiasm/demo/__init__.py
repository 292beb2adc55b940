"""The checkpoint and the pictures that ship with chiasm."""

from chiasm.demo.cases import DemoCase, checkpoint_dir, demo_cases, pictures_dir

__all__ = ["DemoCase", "checkpoint_dir", "demo_cases", "pictures_dir"]
