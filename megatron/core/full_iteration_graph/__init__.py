"""CUDA graphs of whole training steps."""

from megatron.core.full_iteration_graph.graph import CudaRecording, FullIterationGraph, collect_blockers
from megatron.core.full_iteration_graph.pool import GraphPool

__all__ = ["CudaRecording", "FullIterationGraph", "GraphPool", "collect_blockers"]
