"""Steps of whole models on the stand-in for Transformer Engine, with the names of the local implementation.

engine_on_ranks(monkeypatch)                 from here on `layouts.run_step` builds such models on all ranks
with engine() as spec: GPTModel(config, spec(config), ...)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.module_api.global_names import named_global_parameters
from tests.common import fake_te, layouts, resharding, stream_runs
from tests.common.mutants import replaced

_FUSED = (
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)


def local_name(name: str) -> str:
    """Name that the local implementation has for a parameter."""
    for fused, local in _FUSED:
        name = name.replace(fused, local)
    return name


@contextmanager
def engine(**arguments: Any) -> Iterator[Callable[..., Any]]:
    """Install the stand-in; gives the function that makes specs of it."""
    fake_te.install(**arguments)
    try:
        yield lambda config: get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    finally:
        fake_te.uninstall()


def step_job(case, layout, batch, weights, plan, steps, options) -> layouts.RankStep:
    """`layouts.step_job` on the stand-in."""
    kept = layouts.get_gpt_decoder_block_spec, layouts.named_global_parameters
    with engine() as spec:
        layouts.get_gpt_decoder_block_spec = spec
        layouts.named_global_parameters = lambda m: ((local_name(n), p) for n, p in named_global_parameters(m))
        try:
            result = layouts.step_job(case, layout, batch, weights, plan, steps, options)
        finally:
            layouts.get_gpt_decoder_block_spec, layouts.named_global_parameters = kept
    result.grads = {local_name(name): value for name, value in result.grads.items()}
    return result


def engine_on_ranks(monkeypatch: Any) -> None:
    """Let `layouts.run_step` build models of the stand-in, on the workers of the pool."""
    monkeypatch.setattr(layouts, "step_job", step_job)


def passage_job(job: Callable[..., Any], *arguments: Any) -> Any:
    """A job of `resharding` on the stand-in; the names in its passages are those of the local implementation."""
    kept = resharding.get_gpt_decoder_block_spec
    with engine() as spec:
        resharding.get_gpt_decoder_block_spec = spec
        try:
            found = job(*arguments)
        finally:
            resharding.get_gpt_decoder_block_spec = kept
    for passage in found.values() if isinstance(found, dict) else [found]:
        passage.state = {local_name(name): value for name, value in passage.state.items()}
    return found


def checked_job(flags: list[str]) -> str:
    """A training run of `pretrain_gpt.py` on the stand-in under the stream checker; the report, or nothing."""
    import pretrain_gpt

    with engine() as spec, replaced(pretrain_gpt, "get_gpt_decoder_block_spec", lambda config, _: spec(config)):
        return stream_runs.report_of(flags)
