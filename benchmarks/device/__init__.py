"""The device check: its parts as processes, what only a GPU tells, timing, and the report."""
