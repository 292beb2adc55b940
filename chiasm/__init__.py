"""What the three services share: contract, errors, config, servers, channels, transport.

Imports none of the services. Nothing here imports torch, except `chiasm.kernels` and the
`chiasm.transport` backends that say so.
"""

__version__ = "0.1.0"
