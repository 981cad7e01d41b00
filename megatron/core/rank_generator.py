"""Which ranks form which group: arithmetic on integers, no process and no torch needed.

All ranks are one block of numbers with one axis per kind of parallelism; a group is what remains when some axes
are left open and the others are fixed. Two blocks describe the same world:

    dense layers   axes tp, cp, dp, pp     sizes tp * cp * dp * pp  = world
    expert layers  axes etp, ep, edp, pp   sizes etp * ep * edp * pp = world

They fold independently, so expert parallelism may span the TP, CP and DP ranks of one pipeline stage.
The order string lists the axes from the fastest to the slowest changing one; `ep` has size 1 in the dense block,
`cp` has size 1 in the expert block.
"""

from dataclasses import dataclass, field
from itertools import product

from megatron.core.errors import ConfigError

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
PP_BEFORE_DP_ORDER = "tp-cp-ep-pp-dp"
ORDERS = (DEFAULT_ORDER, PP_BEFORE_DP_ORDER)


class RankGenerator:
    """Ranks `rank_offset .. rank_offset + tp*ep*dp*pp*cp - 1` as a block; upstream's constructor and `get_ranks`."""

    def __init__(self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str, rank_offset: int = 0) -> None:
        self.axis_sizes = {"tp": tp, "cp": cp, "ep": ep, "dp": dp, "pp": pp}
        self.order = order.split("-")
        self.rank_offset = rank_offset
        self.world_size = tp * ep * dp * pp * cp
        if sorted(self.order) != sorted(AXES):
            raise ConfigError(f"order={order!r}: must name each of {', '.join(AXES)} once; use {DEFAULT_ORDER!r}.")
        self._strides: dict[str, int] = {}
        stride = 1
        for axis in self.order:
            self._strides[axis] = stride
            stride *= self.axis_sizes[axis]

    def get_ranks(self, token: str) -> list[list[int]]:
        """All groups with the axes of `token` ("tp", "dp-cp", ...) open, in rank order inside and outside."""
        open_axes = token.split("-")
        unknown = sorted(set(open_axes) - set(AXES))
        if unknown:
            raise ConfigError(f"token={token!r}: unknown axis {unknown[0]!r}; known axes are {', '.join(AXES)}.")
        fixed_offsets = self._offsets([axis for axis in self.order if axis not in open_axes])
        open_offsets = self._offsets([axis for axis in self.order if axis in open_axes])
        return [[self.rank_offset + base + step for step in open_offsets] for base in fixed_offsets]

    def _offsets(self, axes: list[str]) -> list[int]:
        """Rank offsets of every coordinate over `axes`, the first of which changes fastest."""
        ranges = [range(self.axis_sizes[axis]) for axis in reversed(axes)]
        strides = [self._strides[axis] for axis in reversed(axes)]
        return [sum(i * s for i, s in zip(coordinate, strides, strict=True)) for coordinate in product(*ranges)]


@dataclass(frozen=True)
class ParallelSizes:
    """The sizes of all kinds of parallelism in one world; refuses sizes that do not fit before any group exists."""

    world_size: int
    """Number of ranks."""
    tp: int = 1
    """Tensor parallel size of the dense layers."""
    cp: int = 1
    """Context parallel size."""
    pp: int = 1
    """Pipeline parallel size, common to dense and expert layers."""
    ep: int = 1
    """Expert parallel size."""
    etp: int | None = None
    """Tensor parallel size of the experts; None means the same as `tp`."""
    order: str = DEFAULT_ORDER
    """Axes from fastest to slowest; one of `ORDERS`."""
    dp: int = field(init=False)
    """Data parallel size of the dense layers, derived."""
    edp: int = field(init=False)
    """Data parallel size of the experts, derived."""

    def __post_init__(self) -> None:
        etp = self.tp if self.etp is None else self.etp
        object.__setattr__(self, "etp", etp)
        for name in ("world_size", "tp", "cp", "pp", "ep", "etp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1; set a positive size.")
        if self.order not in ORDERS:
            raise ConfigError(f"order={self.order!r}: unknown rank order; choose one of {', '.join(ORDERS)}.")
        dense = self.tp * self.cp * self.pp
        if self.world_size % dense:
            raise ConfigError(
                f"world_size={self.world_size}: must be a multiple of {dense} = tensor {self.tp} * context {self.cp} "
                f"* pipeline {self.pp} parallel size; start a fitting number of ranks or lower one of the sizes."
            )
        expert = etp * self.ep * self.pp
        if self.world_size % expert:
            raise ConfigError(
                f"world_size={self.world_size}: must be a multiple of {expert} = expert tensor {etp} * expert "
                f"{self.ep} * pipeline {self.pp} parallel size; start a fitting number of ranks or lower one of the "
                "sizes."
            )
        object.__setattr__(self, "dp", self.world_size // dense)
        object.__setattr__(self, "edp", self.world_size // expert)
        if self.order == PP_BEFORE_DP_ORDER and self.pp > 1 and self.dp != self.edp:
            raise ConfigError(
                f"order={self.order!r} with data parallel size {self.dp} and expert data parallel size {self.edp}: "
                f"both must be equal, else dense and expert layers sit in different stages; use {DEFAULT_ORDER!r}."
            )

    def dense_generator(self) -> RankGenerator:
        """The block of the dense layers."""
        return RankGenerator(tp=self.tp, ep=1, dp=self.dp, pp=self.pp, cp=self.cp, order=self.order)

    def expert_generator(self) -> RankGenerator:
        """The block of the expert layers; its `tp` axis is the expert tensor parallel one."""
        assert self.etp is not None, f"etp={self.etp} is derived in __post_init__"
        return RankGenerator(tp=self.etp, ep=self.ep, dp=self.edp, pp=self.pp, cp=1, order=self.order)


def plan_groups(sizes: ParallelSizes) -> dict[str, list[list[int]]]:
    """Every group of every role: {attribute of ProcessGroupCollection: list of rank lists}.

    Each role's groups are disjoint and cover the world, except `embd` (first and last pipeline stage) and
    `pos_embd` (first stage). All ranks create them in the order of this dict.
    """
    dense, expert = sizes.dense_generator(), sizes.expert_generator()
    stages = dense.get_ranks("pp")
    return {
        "world": [list(range(sizes.world_size))],
        "tp": dense.get_ranks("tp"),
        "pp": stages,
        "mp": dense.get_ranks("tp-pp"),
        "embd": [sorted({stage[0], stage[-1]}) for stage in stages],
        "pos_embd": [[stage[0]] for stage in stages],
        "cp": dense.get_ranks("cp"),
        "tp_cp": dense.get_ranks("tp-cp"),
        "dp": dense.get_ranks("dp"),
        "dp_cp": dense.get_ranks("dp-cp"),
        "tp_dp_cp": dense.get_ranks("tp-dp-cp"),
        "ep": expert.get_ranks("ep"),
        "expt_tp": expert.get_ranks("tp"),
        "tp_ep": expert.get_ranks("tp-ep"),
        "tp_ep_pp": expert.get_ranks("tp-ep-pp"),
        "expt_dp": expert.get_ranks("dp"),
    }
