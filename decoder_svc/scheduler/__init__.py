"""Which sequences run in the next step, with which tokens and pages. No torch, no grpc."""
