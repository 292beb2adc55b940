"""Language models, one file per family, found through the registry."""
