"""Re-export of TransformerConfig under the path that users of Megatron import."""

from megatron.core.configs.transformer import TransformerConfig

__all__ = ["TransformerConfig"]
