"""Studies: sweeps that reproduce published figures at sizes of one's own, each one command."""
