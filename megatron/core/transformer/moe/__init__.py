"""Mixture-of-experts layer: router, dispatchers, experts, shared experts, metrics (layer L6)."""
