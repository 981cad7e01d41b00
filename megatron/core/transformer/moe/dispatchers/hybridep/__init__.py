"""The flex dispatcher with its engines: one copy of a token per destination rank, rows delivered in expert order."""
