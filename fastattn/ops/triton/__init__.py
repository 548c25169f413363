"""The operators on a GPU: Triton kernels and their launchers, imported when first called."""
