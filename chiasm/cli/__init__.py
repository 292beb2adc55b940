"""The command line: `chiasm` and what the services' own commands share."""
