"""The operators on a CPU, in PyTorch: found by the registration of each operator, imported when first called."""
