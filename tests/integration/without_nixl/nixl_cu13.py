"""A library that is not there, for tests."""

raise ImportError("nixl is hidden from this process")
