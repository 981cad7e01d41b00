"""Enumerations that several packages share."""

import enum


class ModelType(enum.Enum):
    """Architecture family that a training loop is asked to run."""

    encoder_or_decoder = 1
