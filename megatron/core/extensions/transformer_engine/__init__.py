"""Transformer Engine behind the interfaces of this tree; importing this package does not import the library."""
