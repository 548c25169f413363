"""What two revisions must compute alike on a CPU: every public operator, cache, policy, module and converted model."""
