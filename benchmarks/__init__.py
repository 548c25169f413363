"""Benchmarks: each is one command, ``python -m benchmarks.NAME``, that checks a result before it times it."""
