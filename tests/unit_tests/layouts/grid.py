"""All layouts of a mixture on 1, 2 and 4 ranks: TP with SP, CP, EP, ETP, DP; ways to keep gradients and activations."""

import dataclasses
import itertools
from collections.abc import Iterator

from tests.common.layouts import Layout
from tests.common.reference_model import GptShape

SEQ_LENGTH, VOCAB_SIZE = 8, 16
"""A multiple of 2 * CP and of TP * CP."""
SHAPE = GptShape(VOCAB_SIZE, SEQ_LENGTH)
HEADS = {"num_attention_heads": 4, "num_query_groups": 2}
LOSSES = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.05, 0.04, 0.03],
    "moe_z_loss_coeff": 0.02,
}
BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
EXPERTS = HEADS | LOSSES | BIAS | {"moe_shared_expert_intermediate_size": 4, "moe_shared_expert_gate": True}
UNEVEN = [8, 1, 0, 3]
"""Tokens with loss in each sample: ranks count unlike numbers of them, some none at all."""

ZERO = {"use_distributed_optimizer": True}
REDUCE = {"overlap_grad_reduce": True, "bucket_size": 200}
GATHER = ZERO | REDUCE | {"overlap_param_gather": True}
BUFFERS = {"plain": {}, "reduce": REDUCE, "zero": ZERO, "gather": GATHER}
"""Gradients reduced at the end or beside backward; states whole or sharded; weights gathered at once or when used."""

MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")
RECOMPUTE = {"all_kept": (), "layers": ("uniform", "1"), "modules": MODULES}
"""Activations kept, computed again layer by layer, or part by part."""


def split(tp: int = 1, cp: int = 1, dp: int = 1, **changes) -> Layout:
    """A layout of a mixture; with TP the sequence of a rank is split."""
    return Layout(tp=tp, is_sequence_parallel=tp > 1, cp=cp, dp=dp, **changes)


def every_size() -> Iterator[Layout]:
    """All sizes on 1, 2 and 4 ranks with TP and CP up to 2, once each."""
    for tp, cp, dp in ((t, c, d) for t in (1, 2) for c in (1, 2) for d in (1, 2, 4)):
        for ep, etp in ((e, x) for e in (1, 2, 4) for x in (1, 2)):
            if tp * cp * dp <= 4 and (tp * cp * dp) % (ep * etp) == 0:
                yield split(tp, cp, dp, ep=ep, etp=etp)


def comm_types(layout: Layout) -> tuple[str, ...]:
    """How attention can reach other CP ranks; with two query groups TP and CP cannot both take some."""
    if layout.cp == 1:
        return ("p2p",)
    return ("p2p", "all_gather", "a2a") if layout.tp == 1 else ("p2p", "all_gather")


def every_layout() -> Iterator[Layout]:
    """All sizes with every form of buffers and of recompute, and with every dispatcher and way of attention."""
    for size in every_size():
        for buffers, recompute in itertools.product(BUFFERS.values(), RECOMPUTE.values()):
            yield dataclasses.replace(size, **buffers, recompute=recompute)
        for recompute in RECOMPUTE.values():
            yield dataclasses.replace(size, dispatcher="allgather", recompute=recompute, **GATHER)
            yield dataclasses.replace(size, dispatcher="flex", recompute=recompute, **ZERO)
        for comm_type in comm_types(size)[1:]:
            yield dataclasses.replace(size, cp_comm_type=comm_type, **ZERO)


LAYERS, PARTS = {"recompute": RECOMPUTE["layers"]}, {"recompute": RECOMPUTE["modules"]}
CHOSEN = [
    split(tp=2, etp=2, **ZERO),
    split(tp=2, dp=2, ep=2, etp=1, **GATHER),
    split(tp=2, dp=2, ep=2, etp=2, **ZERO, **LAYERS),
    split(tp=2, dp=2, ep=4, etp=1, dispatcher="allgather", **GATHER, **PARTS),
    split(tp=2, dp=2, etp=2, **REDUCE),
    split(tp=2, cp=2, ep=2, etp=2, **GATHER, **LAYERS),
    split(cp=2, dp=2, ep=2, etp=1, cp_comm_type="all_gather", **REDUCE, **PARTS),
    split(cp=2, dp=2, ep=2, etp=2, **ZERO),
    split(tp=2, cp=2, ep=4, etp=1, dispatcher="flex", **ZERO),
]
"""For every change: TP and CP with sharded states, with overlap and with recompute."""
