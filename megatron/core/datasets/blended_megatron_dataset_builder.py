"""Re-export: the module path that users of Megatron import the builder from."""

from megatron.core.datasets.blended_builder import BlendedMegatronDatasetBuilder

__all__ = ["BlendedMegatronDatasetBuilder"]
