"""Schedules: plans of forward and backward actions, and the executor that runs them."""

from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

__all__ = ["get_forward_backward_func"]
