"""Plans by name: pure functions from sizes and rank to the list of actions of that rank."""

from collections.abc import Callable

from megatron.core.pipeline_parallel.actions import Action, PlanShape
from megatron.core.pipeline_parallel.plans.no_pipelining import no_pipelining

PLANS: dict[str, Callable[[PlanShape], list[Action]]] = {
    "no_pipelining": no_pipelining,
}
