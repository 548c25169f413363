"""Examples: each is one command, ``python -m examples.NAME``."""
