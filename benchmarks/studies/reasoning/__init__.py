"""A reasoning task, models trained for it here, and their score against cache size, as one command."""
