"""Measurements that are run by hand; see RESULTS.md."""
