"""Clients of other projects, each run as it is by a Python of its own."""
