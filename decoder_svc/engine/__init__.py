"""The engine: one thread that takes requests through their lives, step by step."""
