"""What every module of the tree shares: base class, specs, global parameter names, initial weights (layer L4)."""
