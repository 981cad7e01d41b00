"""Loads that random data never produces, the same in every layout.

A plan is a pure function (layer, global token ids [T]) -> expert ids [T, k]. Every token carries its global id
(sample * sequence length + position), so that all layouts and the reference see the same choice:

    with forced_routing(model, all_to_rank(0, 2, num_experts=8, topk=2)) as forced:
        forced.token_ids = ids_of_this_microbatch        # int64 [T], in the order of the router's rows
        ...

Only the choice is replaced, at the router's method `select_experts`; weights stay the real scores at the chosen
experts, so the router still gets gradients.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Plan = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Table:
    """A plan as data, so that it can travel to a worker: allowed experts, and how a token picks among them."""

    name: str
    experts: tuple[int, ...]
    topk: int
    seed: int | None = None

    def __call__(self, layer: int, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> int64 [T, k]."""
        rows = [self._pick(layer, int(token)) for token in token_ids]
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), self.topk)

    def _pick(self, layer: int, token: int) -> list[int]:
        if self.seed is None:  # neighbouring experts in turn
            return [self.experts[(token * self.topk + i) % len(self.experts)] for i in range(self.topk)]
        generator = torch.Generator().manual_seed(self.seed + 1009 * layer + 9176 * token)
        order = torch.randperm(len(self.experts), generator=generator)[: self.topk]
        return [self.experts[int(i)] for i in order]

    def __str__(self) -> str:
        return self.name


def spread_evenly(num_experts: int, topk: int) -> Plan:
    """Every expert gets the same number of tokens, if their number allows it."""
    return _Table("spread_evenly", tuple(range(num_experts)), topk)


def all_to_experts(experts: tuple[int, ...], topk: int) -> Plan:
    """All tokens to the given experts, at least k of them."""
    return _Table(f"all_to_{'_'.join(map(str, experts))}", tuple(experts), topk)


def all_to_rank(rank: int, ep_size: int, num_experts: int, topk: int) -> Plan:
    """All tokens to the experts of one expert parallel rank."""
    local = num_experts // ep_size
    return _Table(f"all_to_rank{rank}", tuple(range(rank * local, (rank + 1) * local)), topk)


def none_to_expert(expert: int, num_experts: int, topk: int, seed: int = 0) -> Plan:
    """Random, but `expert` gets no token."""
    return _Table(f"none_to_{expert}", tuple(e for e in range(num_experts) if e != expert), topk, seed)


def random_plan(num_experts: int, topk: int, seed: int) -> Plan:
    """Random experts, depending on seed, layer and token alone."""
    return _Table(f"random{seed}", tuple(range(num_experts)), topk, seed)


@dataclass
class ForcedRouting:
    """Handle of an active plan; the caller sets `token_ids` before each microbatch."""

    token_ids: torch.Tensor | None = None


@contextmanager
def forced_routing(model: torch.nn.Module, plan: Plan) -> Iterator[ForcedRouting]:
    """Let every router of `model` choose by `plan` inside the block."""
    handle = ForcedRouting()
    routers = [module for module in model.modules() if hasattr(module, "select_experts")]
    if not routers:
        raise AssertionError("the model has no router to force.")
    for router in routers:
        layer = router.layer_number - 1

        def choose(scores: torch.Tensor, layer: int = layer) -> torch.Tensor:
            assert handle.token_ids is not None, "set token_ids before the microbatch"
            assert len(handle.token_ids) == len(scores), (
                f"layer {layer}: {len(scores)} rows, {len(handle.token_ids)} token ids"
            )
            return plan(layer, handle.token_ids).to(scores.device)

        router.select_experts = choose
    try:
        yield handle
    finally:
        for router in routers:
            del router.select_experts
