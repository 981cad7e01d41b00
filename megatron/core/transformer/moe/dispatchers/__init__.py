"""The dispatchers, one module each; see the registry in `token_dispatcher`."""
