"""Launch lines that the tests of the stream checker share; all are small, on two ranks unless they say otherwise."""

from tests.common.stream_runs import TINY_MOE

OVERLAP = (*TINY_MOE, "--overlap-moe-expert-parallel-comm")
DELAYED = (*OVERLAP, "--delay-wgrad-compute")
ONE_EXPERT = ("--num-experts", "2", "--moe-router-pre-softmax")
ZERO = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
HYBRIDEP = ("--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep")
PIPELINE = (
    *("--pipeline-model-parallel-size", "2", "--num-layers", "4", "--moe-layer-freq", "[0,1,1,1]"),
    *("--expert-model-parallel-size", "1", "--global-batch-size", "4"),
)
EP2 = ("--expert-model-parallel-size", "2")
CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
FP8 = ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise")
SHARED = ("--moe-shared-expert-intermediate-size", "8")
PIPELINE_OVERLAP = (*DELAYED, *PIPELINE, *EP2, *CHUNKS)
"""On four ranks."""
