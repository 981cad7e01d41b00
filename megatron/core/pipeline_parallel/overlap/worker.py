"""Does the actions of a schedule with chunk plans, so that a pair of them hides communication."""

from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from megatron.core import streams
from megatron.core.errors import ConfigError
from megatron.core.pipeline_parallel.actions import Action
from megatron.core.pipeline_parallel.overlap.chunk_plan import ChunkPlan
from megatron.core.pipeline_parallel.overlap.combined_1f1b import run_pair
from megatron.core.pipeline_parallel.overlap.layer_plan import PlanSettings
from megatron.core.pipeline_parallel.overlap.protocol import StagedModel
from megatron.core.pipeline_parallel.step import StepContext, microbatch_loss, output_gradient


class OverlapWorker:
    """Runs forwards and backwards as chunk plans; holds those whose backward is still to come."""

    def __init__(self, context: StepContext) -> None:
        config = context.config
        self.context = context
        self.settings = PlanSettings(
            delays_wgrad=config.delay_wgrad_compute,
            releases_attention_early=config.ep_overlap_early_attn_memory_release,
            draws=getattr(config, "draws_in_forward", True),
            num_comm_sms=getattr(config, "moe_flex_dispatcher_num_sms", None) or 0,
        )
        self._leaves_wgrads = context.shape.delays_wgrad and context.shape.pp_size > 1
        self._unfinished: dict[tuple[int, int], ChunkPlan] = {}
        """Behind their backward, ahead of their W."""
        self._plans: dict[tuple[int, int], tuple[ChunkPlan, torch.Tensor | None]] = {}

    def streams(self) -> AbstractContextManager[None]:
        """The streams of a step."""
        device = next(self.context.chunks[0].parameters()).device
        return streams.step(device, self.context.config.high_priority_a2a_comm_stream)

    def forward(self, action: Action, received: torch.Tensor | None) -> torch.Tensor:
        """Run one forward on `received` [s, b, h] with nothing beside it."""
        output, _ = self._run(action, None, received, None)
        assert output is not None, f"{action} returned nothing"
        return output

    def backward(self, action: Action, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Run one backward from `grad` [s, b, h] with nothing beside it."""
        return self._run(None, action, None, grad)[1]

    def overlap(
        self, action: Action, received: torch.Tensor | None, grad: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a pair on `received` [s, b, h] and `grad` [s, b, h]."""
        self.settings.counters["pairs overlapped"] += 1
        first, second = action.parts
        output, input_grad = self._run(first, second, received, grad)
        assert output is not None, f"{action} returned nothing"
        return output, input_grad

    def weight_grads(self, action: Action) -> None:
        """Compute the weight gradients of the first layer of a chunk; the gradient of its input is on its way."""
        num_products = self._unfinished.pop((action.chunk, action.microbatch)).finish_weight_grads()
        if not self.context.is_first(action.chunk):
            self.settings.counters["wgrads behind a send"] += num_products

    def _run(
        self,
        forward: Action | None,
        backward: Action | None,
        received: torch.Tensor | None,
        grad: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run one or both on `received` [s, b, h] and `grad` [s, b, h]."""
        new = None if forward is None else self._plan(forward)
        old = None
        if backward is not None:
            old, loss = self._plans.pop((backward.chunk, backward.microbatch))
            grad = output_gradient(self.context, loss, grad)
        output, input_grad = run_pair(new, old, received, grad)
        if backward is not None and old is not None and self._leaves_wgrads:
            self._unfinished[backward.chunk, backward.microbatch] = old
        if forward is not None and new is not None:
            loss = output if self.context.is_last(forward.chunk) else None
            self._plans[forward.chunk, forward.microbatch] = new, loss
        return output, input_grad

    def _plan(self, action: Action) -> ChunkPlan:
        """Let the user's forward step call the model, note the call, and cut it up."""
        chunk = self.context.chunks[action.chunk]
        recorder = _CallRecorder(chunk)
        _, loss_func = self.context.forward_step_func(self.context.data_iterators[action.chunk], recorder)
        is_last = self.context.is_last(action.chunk)
        stages = _staged(chunk).build_schedule_plan(*recorder.args, **recorder.kwargs)
        return ChunkPlan(
            stages,
            lambda output: microbatch_loss(self.context, output, loss_func) if is_last else output,
            f"{action.chunk}.{action.microbatch}",
            self.settings,
            leaves_wgrads=self._leaves_wgrads,
        )

    def finish(self) -> None:
        """Check that nothing is left, and report what happened."""
        assert not self._plans, f"forward without backward for (chunk, microbatch) {sorted(self._plans)}"
        assert not self._unfinished, f"backward without W for (chunk, microbatch) {sorted(self._unfinished)}"
        count = self.context.config.count_func
        if count is not None:
            count(self.settings.counters)


class _CallRecorder:
    """Stands in for the model in the user's forward step, and notes the call instead of running it."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        self._chunk = chunk
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> "_LaterOutput":
        self.args, self.kwargs = args, kwargs
        return _LaterOutput()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunk, name)


class _LaterOutput:
    """Output of a model that has not run yet."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ConfigError(
            f"overlap_moe_expert_parallel_comm=True: the forward step reads {name!r} of the model's output, which is "
            "computed later; read it in the loss function, which is given the output."
        )


def _staged(chunk: torch.nn.Module) -> StagedModel:
    """Look for the staged model inside wrappers."""
    module: Any = chunk
    while not isinstance(module, StagedModel):
        if not hasattr(module, "module"):
            raise ConfigError(
                f"overlap_moe_expert_parallel_comm=True with a {type(chunk).__name__}: the model has no "
                "build_schedule_plan that cuts it into stages; drop --overlap-moe-expert-parallel-comm."
            )
        module = module.module
    return module
