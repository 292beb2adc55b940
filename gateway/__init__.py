"""The gateway: OpenAI REST and gRPC in, encoders and decoders out. Read `pipeline.py` first."""
