"""Which layers of the decoder are mixture-of-experts layers."""

from collections.abc import Sequence

from megatron.core.errors import ConfigError


def moe_layer_pattern(moe_layer_freq: int | Sequence[int], num_layers: int) -> list[bool]:
    """Return for each global layer, counted from 0, whether it is a MoE layer.

    An integer N makes layer i one iff i % N == 0; a list says it layer by layer with 0 and 1.
    """
    if isinstance(moe_layer_freq, int):
        if moe_layer_freq < 1:
            raise ConfigError(
                f"moe_layer_freq={moe_layer_freq}: every N-th layer is MoE, so N is 1 or more; "
                "set --moe-layer-freq to a positive integer or to a list of 0 and 1."
            )
        return [layer % moe_layer_freq == 0 for layer in range(num_layers)]
    if len(moe_layer_freq) != num_layers:
        raise ConfigError(
            f"moe_layer_freq has {len(moe_layer_freq)} entries with num_layers={num_layers}: one entry per layer; "
            "make the list and --num-layers agree."
        )
    wrong = [entry for entry in moe_layer_freq if entry not in (0, 1)]
    if wrong:
        raise ConfigError(
            f"moe_layer_freq={list(moe_layer_freq)}: entries are 0 or 1, not {wrong[0]}; correct the list."
        )
    return [bool(entry) for entry in moe_layer_freq]
