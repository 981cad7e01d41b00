"""Training in 8-bit floating point: recipes, quantisation, scaling state."""
