"""Re-export of ModelParallelConfig under the path that users of Megatron import."""

from megatron.core.configs.parallel import ModelParallelConfig

__all__ = ["ModelParallelConfig"]
