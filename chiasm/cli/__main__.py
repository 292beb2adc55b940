"""`python -m chiasm.cli` is `chiasm`."""

from chiasm.cli.main import main

main()
