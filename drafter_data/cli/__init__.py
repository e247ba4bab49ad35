"""The `drafter-data` command: one module a command, each a thin shell over a plain function."""
