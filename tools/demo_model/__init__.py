"""Draws, trains and evaluates the demo checkpoint that ships in `chiasm/demo`."""
