"""What the benchmark commands share: timing in turns, operator cases, compiling kernels for absent chips."""
