"""Old spellings: mapped to the current flag with one notice, or answered with the flag that exists."""

import dataclasses
import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.core.configs.flag_spec import FlagSpec
from megatron.core.transformer.moe.token_dispatcher import dispatcher_class
from megatron.training.flag_table.rows import negative, switch, value, words

if TYPE_CHECKING:
    from megatron.training.argument_factory import GivenArguments


@dataclasses.dataclass(frozen=True)
class Alias:
    """A deprecated flag; `targets` turns its value into the values of current destinations."""

    flag: FlagSpec
    current: str
    targets: Callable[[Any], dict[str, Any]]


def _graph_scope(names: list[str]) -> dict[str, Any]:
    if "full_iteration" in names:
        return {"cuda_graph_impl": "full_iteration"}
    return {"cuda_graph_modules": [name for name in names if name != "full"]}


def _num_sms(count: Any) -> dict[str, Any]:
    return {"moe_flex_dispatcher_num_sms": count}


ALIASES: tuple[Alias, ...] = (
    Alias(
        switch("--use-rotary-position-embeddings"),
        "--position-embedding-type rope",
        lambda _: {"position_embedding_type": "rope"},
    ),
    Alias(
        negative("--no-position-embedding", "add_position_embedding"),
        "--position-embedding-type none",
        lambda _: {},
    ),
    Alias(
        switch("--recompute-activations"),
        "--recompute-granularity selective",
        lambda _: {"recompute_granularity": "selective"},
    ),
    Alias(
        switch("--moe-layer-recompute"),
        "--recompute-granularity selective --recompute-modules moe",
        lambda _: {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ),
    Alias(
        switch("--checkpoint-activations"),
        "--recompute-granularity full --recompute-method uniform",
        lambda _: {"recompute_granularity": "full"},
    ),
    Alias(
        switch("--moe-enable-deepep"),
        "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
        lambda _: {"moe_flex_dispatcher_backend": "deepep"},
    ),
    Alias(value("--moe-deepep-num-sms", int), "--moe-flex-dispatcher-num-sms", _num_sms),
    Alias(value("--moe-hybridep-num-sms", int), "--moe-flex-dispatcher-num-sms", _num_sms),
    Alias(
        switch("--moe-router-padding-for-fp8"),
        "--moe-router-padding-for-quantization",
        lambda _: {"moe_router_padding_for_quantization": True},
    ),
    Alias(switch("--enable-cuda-graph"), "--cuda-graph-impl local", lambda _: {"cuda_graph_impl": "local"}),
    Alias(
        switch("--external-cuda-graph"),
        "--cuda-graph-impl transformer_engine",
        lambda _: {"cuda_graph_impl": "transformer_engine"},
    ),
    Alias(words("--cuda-graph-scope", str), "--cuda-graph-modules, or a value of --cuda-graph-impl", _graph_scope),
)

REPLACED = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--fake-init-process-group": "--fake-process-group",
    "--fp8": "--fp8-format",
    "--fp8-hybrid": "--fp8-format hybrid",
    "--te-rng-track": "--te-rng-tracker",
    "--overlap-p2p-comm": "nothing (it is the default; --no-overlap-p2p-communication turns it off)",
    "--grad-reduce-in-fp32": "--accumulate-allreduce-grads-in-fp32",
}


def apply_aliases(given: "GivenArguments") -> None:
    """Replace deprecated values by current ones, with one notice each; a contradiction becomes a problem."""
    _join_graph_switch_and_scope(given)
    for alias in ALIASES:
        if alias.flag.dest not in given.values:
            continue
        old = given.spellings.pop(alias.flag.dest)
        targets = alias.targets(given.values.pop(alias.flag.dest))
        if alias.flag.dest == "add_position_embedding":
            targets = _without_positions(given)
        given.notices.append(f"{old} is deprecated; use {alias.current}")
        for dest, new in targets.items():
            if dest in given.values and given.values[dest] != new:
                given.problems.append(
                    f"{dest}={given.values[dest]!r}: {old} asks for {new!r} and {given.spellings[dest]} for another "
                    f"value; keep {given.spellings[dest]}"
                )
            else:
                given.values[dest] = new
                given.spellings[dest] = old
    _check_deepep(given)


def _join_graph_switch_and_scope(given: "GivenArguments") -> None:
    """Once one flag switched graphs on and another said how far they reach; here the second says it all."""
    if "full_iteration" not in given.values.get("cuda_graph_scope", []):
        return
    for dest in ("enable_cuda_graph", "external_cuda_graph"):
        if given.values.pop(dest, None) is not None:
            given.notices.append(f"{given.spellings.pop(dest)} is deprecated; use --cuda-graph-impl full_iteration")


def _without_positions(given: "GivenArguments") -> dict[str, Any]:
    """--no-position-embedding drops a learned table; with another scheme there is none to drop."""
    scheme = given.values.get("position_embedding_type", "learned_absolute")
    return {"position_embedding_type": "none"} if scheme == "learned_absolute" else {}


def _check_deepep(given: "GivenArguments") -> None:
    if not given.values.get("num_experts"):
        return  # no flag about experts has an effect, which is said of all of them together
    dispatcher = given.values.get("moe_token_dispatcher_type", "allgather")
    if "moe_token_dispatcher_type" in given.unreadable or dispatcher_class(dispatcher).has_backends:
        return
    for dest in ("moe_flex_dispatcher_backend", "moe_hybridep_engine", "moe_flex_dispatcher_num_sms"):
        if given.values.get(dest) is not None:
            given.problems.append(
                f"{dest}={given.values[dest]!r} with moe_token_dispatcher_type={dispatcher!r}: this dispatcher "
                f"has no backends; drop {given.spellings[dest]} or use --moe-token-dispatcher-type flex"
            )


def explain_unknown(flag: str, known: list[str]) -> str:
    """What to say about a flag that does not exist."""
    if flag in REPLACED:
        return f"{flag}: no flag of this parser; use {REPLACED[flag]}"
    if flag.replace("_", "-") in known:
        return f"{flag}: flags have hyphens; use {flag.replace('_', '-')}"
    whole = [name for name in known if name.startswith(flag + "-")][:3]
    close = whole or difflib.get_close_matches(flag, known, n=3, cutoff=0.75)
    hint = f"did you mean {' or '.join(close)}" if close else "--help lists all flags"
    return f"{flag}: unknown flag; {hint}"
