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


Cell = tuple[Layout, bool]
"""A layout, and whether the loss of a step is the mean over all its tokens."""


def cell(
    sizes: tuple[int, int, int, int, int],
    buffers: str,
    recompute: str,
    dispatcher: str,
    comm_type: str,
    is_per_token: bool,
) -> Cell:
    """Sizes are those of TP, CP, DP, EP and ETP."""
    tp, cp, dp, ep, etp = sizes
    options = {"recompute": RECOMPUTE[recompute], "dispatcher": dispatcher, "cp_comm_type": comm_type}
    return split(tp, cp, dp, ep=ep, etp=etp, **BUFFERS[buffers], **options), is_per_token


def every_cell() -> Iterator[Cell]:
    """All sizes with all choices at once."""
    dispatchers = ("alltoall", "allgather", "flex")
    for size in every_size():
        sizes = (size.tp, size.cp, size.dp, size.ep, size.etp)
        for choice in itertools.product(BUFFERS, RECOMPUTE, dispatchers, comm_types(size), (False, True)):
            yield cell(sizes, *choice)


def pairs_of(chosen: Cell) -> set[tuple]:
    """Every two values of a cell, each with the name of its axis."""
    layout, is_per_token = chosen
    buffers = (layout.use_distributed_optimizer, layout.overlap_grad_reduce, layout.overlap_param_gather)
    values = {name: getattr(layout, name) for name in ("tp", "cp", "dp", "ep", "etp", "dispatcher", "recompute")}
    values |= {"buffers": buffers, "per_token": is_per_token}
    if layout.cp > 1:
        values["cp_comm_type"] = layout.cp_comm_type
    return set(itertools.combinations(sorted(values.items(), key=lambda item: item[0]), 2))


CHOSEN = [
    cell((2, 1, 1, 1, 2), "reduce", "layers", "alltoall", "p2p", True),
    cell((2, 1, 1, 2, 1), "plain", "modules", "flex", "p2p", False),
    cell((1, 2, 1, 1, 2), "gather", "all_kept", "flex", "p2p", False),
    cell((1, 2, 1, 1, 2), "gather", "layers", "alltoall", "a2a", True),
    cell((1, 2, 1, 1, 2), "reduce", "modules", "allgather", "p2p", False),
    cell((1, 2, 1, 1, 2), "zero", "modules", "allgather", "all_gather", True),
    cell((1, 2, 1, 2, 1), "gather", "modules", "alltoall", "all_gather", False),
    cell((1, 2, 1, 2, 1), "plain", "all_kept", "allgather", "a2a", False),
    cell((1, 2, 1, 2, 1), "reduce", "modules", "alltoall", "a2a", False),
    cell((1, 2, 1, 2, 1), "zero", "layers", "alltoall", "all_gather", False),
    cell((2, 1, 2, 4, 1), "gather", "modules", "allgather", "p2p", False),
    cell((2, 2, 1, 4, 1), "plain", "layers", "flex", "all_gather", False),
    cell((2, 2, 1, 4, 1), "zero", "all_kept", "allgather", "p2p", False),
    cell((1, 1, 4, 1, 1), "plain", "layers", "allgather", "p2p", False),
    cell((1, 1, 4, 1, 1), "zero", "modules", "flex", "p2p", False),
    cell((1, 1, 4, 2, 2), "gather", "modules", "flex", "p2p", False),
    cell((1, 1, 4, 4, 1), "reduce", "all_kept", "alltoall", "p2p", True),
    cell((1, 2, 2, 1, 2), "reduce", "all_kept", "flex", "all_gather", True),
    cell((1, 2, 2, 2, 2), "plain", "layers", "alltoall", "p2p", True),
    cell((1, 2, 2, 4, 1), "zero", "modules", "flex", "a2a", True),
]
"""For every change: each value of each axis beside each value of each other axis that goes with it."""
