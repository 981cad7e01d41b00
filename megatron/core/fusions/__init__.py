"""Tensor functions that a kernel may replace: one operation per file, no groups, no configuration (layer L1)."""
