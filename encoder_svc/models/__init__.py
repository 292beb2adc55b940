"""Vision towers, one file a family."""
