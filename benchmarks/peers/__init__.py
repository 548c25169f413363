"""Other libraries beside this one: what runs in their own environments, and their tests with thin adapters."""
