"""Layers of other libraries behind the interfaces of this tree (layer L5)."""
