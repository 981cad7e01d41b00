"""Models assembled from `core/transformer` (layer L7)."""
