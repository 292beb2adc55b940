"""Generated stubs of `proto/chiasm/v1` (`make proto`)."""
