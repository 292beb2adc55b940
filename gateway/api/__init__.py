"""The two faces of the gateway: OpenAI REST and gRPC. They translate; the pipeline decides."""
