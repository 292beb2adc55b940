"""The parts of a decoder layer. Each takes the mesh or its shards as arguments and loads its own part."""
