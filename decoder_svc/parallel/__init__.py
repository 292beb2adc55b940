"""How the language model is laid over ranks: the mesh and its collectives."""

from decoder_svc.parallel.mesh import ParallelMesh, Shard

__all__ = ["ParallelMesh", "Shard"]
