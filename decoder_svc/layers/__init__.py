"""The parts of a decoder layer. Each is given the mesh or its shards and loads its own part."""
