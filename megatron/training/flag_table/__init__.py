"""The flag table: every flag that parses without a configuration field, by feature, with its status."""

from megatron.training.flag_table import memory, model, moe, parallel, run
from megatron.training.flag_table.rows import Feature, ValueRow

FEATURES: tuple[Feature, ...] = model.FEATURES + moe.FEATURES + parallel.FEATURES + memory.FEATURES + run.FEATURES
VALUES: tuple[ValueRow, ...] = model.VALUES + moe.VALUES + parallel.VALUES + memory.VALUES + run.VALUES
STATES = {"not_yet": "not there yet", "refused": "left out of this tree"}

__all__ = ["FEATURES", "STATES", "VALUES", "Feature", "ValueRow"]
