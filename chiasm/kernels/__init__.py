"""Fused operations that encoder and decoder share: Triton on a GPU, plain torch everywhere else.

A file holds what is called and the plain version, its `_triton` twin the kernel. All can be
captured in CUDA graphs: they wait for nothing on the host, and their grids depend on shapes alone.
"""
