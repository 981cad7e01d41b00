"""Configuration: topic dataclasses, the flat TransformerConfig, and the rules between them."""
