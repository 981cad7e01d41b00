"""Small helpers without any dependency on the rest of the tree (layer L0)."""
