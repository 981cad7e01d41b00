"""Choices of an attention module, under the path that users of Megatron import."""

import enum


class AttnMaskType(enum.Enum):
    """What attention hides by itself, beside the mask it is given."""

    padding = 1
    """Nothing."""

    causal = 2
    """Later positions."""

    arbitrary = 3
    """Nothing: the given mask says everything."""


class AttnBackend(str, enum.Enum):
    """Attention kernels; a member equals its name, so that configurations take either."""

    auto = "auto"
    flash = "flash"
    fused = "fused"
    unfused = "unfused"
    local = "local"
