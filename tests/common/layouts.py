"""The same training step, cut another way: real model, buffers, schedule and optimizer on the ranks of the pool.

    got = run_step(pool, case, Layout(ep=2, dp=2), batch, weights, plan=all_to_rank(0, 2, 8, 2))
    assert_matches(reference_step(...), got)

The global batch is always the same samples in the same order: microbatch m of data parallel rank d is block m * dp + d.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.deferred_wgrad import WgradQueue, deferring
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.module_api.global_names import named_global_parameters
from megatron.core.module_api.weight_init import local_slice
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.param_attrs import param_attrs
from megatron.core.pipeline_layout import num_chunks
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import set_random_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_logging import LOSS_LABELS, MoEMetrics
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training.model_setup import build_chunks
from tests.common.collective_log import CollectiveLog
from tests.common.forced_router import Plan, forced_routing
from tests.common.reference import Batch, StepResult
from tests.common.reference_model import GptShape

GRAD_KEYS = ("grad_reduce_in_bf16", "overlap_grad_reduce", "bucket_size", "average_in_collective")


@dataclass(frozen=True)
class Layout:
    """How a step is cut and carried out. `dp` counts all data parallel ranks, those of EP included; EP may span TP."""

    dp: int = 1
    ep: int = 1
    tp: int = 1
    is_sequence_parallel: bool = False
    cp: int = 1
    cp_comm_type: str = "p2p"
    etp: int | None = None
    pp: int = 1
    vpp: int | None = None
    pipeline_layout: str | None = None
    group_size: int | None = None
    overlap_p2p: bool = True
    micro_batch_size: int = 1
    dispatcher: str = "alltoall"
    is_grouped: bool = False
    dtype: torch.dtype = torch.float64
    overlap_grad_reduce: bool = False
    bucket_size: int | None = None
    average_in_collective: bool = False
    use_distributed_optimizer: bool = False
    overlap_param_gather: bool = False
    delays_wgrad: bool = False
    fuses_wgrad: bool = True
    recompute: tuple[str, ...] = ()
    overlap: bool = False
    """Hide expert communication behind another microbatch."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def sequence_shards(self) -> int:
        """Parts in which the ranks of a TP group hold a sequence between the layers."""
        return self.tp if self.is_sequence_parallel else 1

    def __str__(self) -> str:
        """Test id: what differs from the defaults."""
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return "-".join(f"{name}={value}" for name, value in changed) or "one_rank"


@dataclass(frozen=True)
class ModelCase:
    """A model: fields of TransformerConfig that no layout changes, and the arguments of GPTModel."""

    config_fields: Mapping[str, Any]
    shape: GptShape = field(default_factory=GptShape)

    def config(self, layout: Layout) -> TransformerConfig:
        """The configuration under a layout."""
        return TransformerConfig(
            **self.config_fields,
            device="cpu",
            params_dtype=layout.dtype,
            bf16=layout.dtype is torch.bfloat16,
            tensor_model_parallel_size=layout.tp,
            sequence_parallel=layout.is_sequence_parallel,
            context_parallel_size=layout.cp,
            cp_comm_type=layout.cp_comm_type,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            pipeline_model_parallel_layout=layout.pipeline_layout,
            microbatch_group_size_per_vp_stage=layout.group_size,
            overlap_p2p_comm=layout.overlap_p2p,
            moe_token_dispatcher_type=layout.dispatcher,
            moe_grouped_gemm=layout.is_grouped,
            gradient_accumulation_fusion=layout.fuses_wgrad,
            **recompute_fields(layout.recompute),
        )


def recompute_fields(words: tuple[str, ...]) -> dict[str, Any]:
    """Fields for ("uniform", "2"), ("block", "1"), the same with "distributed" behind, or the modules to recompute."""
    if not words:
        return {}
    if words[0] not in ("uniform", "block"):
        return {"recompute_granularity": "selective", "recompute_modules": list(words)}
    return {
        "recompute_granularity": "full",
        "recompute_method": words[0],
        "recompute_num_layers": int(words[1]),
        "distribute_saved_activations": words[2:] == ("distributed",),
    }


@dataclass
class RankStep:
    """What one rank sends back: its own shards."""

    loss_sums: torch.Tensor
    """[2]: token losses and tokens of this rank in the first step."""
    grads: dict[str, tuple[torch.Tensor, Any, int]]
    """{global name: (local gradient, ParamAttrs without its init, parts along the cut)}."""
    params: dict[str, tuple[torch.Tensor, Any, int]]
    grad_norm: float | None
    aux: dict[str, float]
    routing_maps: dict[int, dict[int, torch.Tensor]]
    """{layer: {token id: bool [E]}}, first step."""
    expert_bias: dict[int, torch.Tensor]
    log: list[Any]
    counters: Counter[str]
    """What the schedule did, over all steps."""


def run_step(
    pool: Any,
    case: ModelCase,
    layout: Layout,
    batch: Batch,
    weights: Mapping[str, torch.Tensor],
    plan: Plan | None = None,
    steps: int = 1,
    **options: Any,
) -> StepResult:
    """Run `steps` equal steps and join all ranks' results; gradients and routing are those of the first step.

    Options: `expert_bias` {layer: [E]}, `learning_rate` and `clip_grad` of plain SGD.
    """
    ranks = pool.run(step_job, case, layout, batch, dict(weights), plan, steps, options, world_size=layout.world_size)
    return join_ranks(ranks)


def join_ranks(ranks: Sequence[RankStep]) -> StepResult:
    """Assemble full tensors; copies on several ranks must be bitwise equal."""
    for rank in ranks[1:]:
        assert rank.grad_norm == ranks[0].grad_norm, f"gradient norms {[r.grad_norm for r in ranks]}"
        assert rank.aux == ranks[0].aux, f"logged values {[r.aux for r in ranks]}"
    biases: dict[int, torch.Tensor] = {}
    for layer, bias in (item for rank in ranks for item in rank.expert_bias.items()):
        assert torch.equal(bias, biases.setdefault(layer, bias)), f"expert bias of layer {layer} differs between ranks"
    maps = {}
    for layer in sorted({layer for rank in ranks for layer in rank.routing_maps}):
        rows = {token: row for rank in ranks for token, row in rank.routing_maps.get(layer, {}).items()}
        maps[layer] = torch.stack([rows[token] for token in sorted(rows)])
    sums = torch.stack([rank.loss_sums for rank in ranks]).sum(0)
    return StepResult(
        loss=float(sums[0] / sums[1]),
        grads=join_shards("gradient", [rank.grads for rank in ranks]),
        params=join_shards("parameter", [rank.params for rank in ranks]),
        aux=ranks[0].aux,
        routing_maps=maps,
        tokens_per_expert={layer: routing_map.sum(0) for layer, routing_map in maps.items()},
        expert_bias=biases,
        grad_norm=ranks[0].grad_norm,
        logs=[rank.log for rank in ranks],
        counters=ranks[0].counters,
    )


def join_shards(kind: str, shards: Sequence[dict[str, tuple[torch.Tensor, Any, int]]]) -> dict[str, torch.Tensor]:
    """{name: full tensor} from every rank's local ones."""
    found: dict[str, dict[int, tuple[int, torch.Tensor, int, int]]] = {}
    for rank, local in enumerate(shards):
        for name, (tensor, (dim, num_parts, part), pieces) in local.items():
            owner = found.setdefault(name, {}).setdefault(part, (rank, tensor, dim, num_parts))
            assert torch.equal(owner[1], tensor), f"{kind} {name} differs between ranks {owner[0]} and {rank}"
            assert pieces >= 1, f"{kind} {name}: {pieces} pieces"
    full = {}
    for name, parts in found.items():
        _, first, dim, num_parts = parts[0]
        if dim is None:
            full[name] = first
        else:
            chunks = [parts[part][1].chunk(num_parts, dim) for part in sorted(parts)]
            full[name] = torch.cat([chunk[i] for i in range(num_parts) for chunk in chunks], dim)
    return full


def step_job(case, layout, batch, weights, plan, steps, options) -> RankStep:
    """The job of one rank."""
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    set_random_seed(1, device="cpu")
    config = case.config(layout)
    config.finalize_model_grads_func = finalize_model_grads
    counters = _choose_schedule(config, layout)
    models = _build_chunks(config, case.shape)
    load_weights(models, weights)
    routers = {m.layer_number - 1: m for model in models for m in model.modules() if isinstance(m, TopKRouter)}
    for layer, bias in options.get("expert_bias", {}).items():
        if layer in routers:
            routers[layer].expert_bias.copy_(bias)
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=layout.overlap_grad_reduce,
        bucket_size=layout.bucket_size,
        average_in_collective=layout.average_in_collective,
        use_distributed_optimizer=layout.use_distributed_optimizer,
        overlap_param_gather=layout.overlap_param_gather,
    )
    chunks = [DistributedDataParallel(config, ddp_config, model) for model in models]
    optimizer = get_megatron_optimizer(_plain_sgd(layout, options), chunks)
    result = RankStep(
        torch.zeros(2, dtype=torch.float64), {}, {}, None, {}, {layer: {} for layer in routers}, {}, [], counters
    )
    with ExitStack() as stack:
        routed = [model for model in models if any(isinstance(m, TopKRouter) for m in model.modules())]
        forced = [stack.enter_context(forced_routing(model, plan)) for model in routed] if plan is not None else []
        for step in range(steps):
            blocks = blocks_of_rank(batch, layout)
            ids = [shard_token_ids(block, batch.tokens.shape[1], layout) for block in blocks]
            hooks = [] if step else _record_routing(routers, ids, result.routing_maps)
            with CollectiveLog() if step == 0 else nullcontext() as log:
                work = list(zip(blocks, ids, strict=True))
                sums = run_microbatches(chunks, batch, work, forced, layout.delays_wgrad and not layout.overlap)
                grads = {s.name: shard_of(s.param, s.tensors["main_grad"]) for s in optimizer.whole_state()}
                _, norm, _ = optimizer.step()
            for hook in hooks:
                hook.remove()
            if log is not None:
                result.loss_sums, result.grads, result.grad_norm, result.log = sums, grads, norm, log.records
                logged = MoEMetrics(chunks).reduce_and_reset(len(blocks))
                result.aux = {kind: logged[label] for kind, label in LOSS_LABELS.items() if label in logged}
    for chunk in chunks:
        chunk.finish_param_sync()
        result.params |= {n: shard_of(p, p.detach()) for n, p in named_global_parameters(chunk)}
    result.expert_bias = {layer: r.expert_bias for layer, r in routers.items() if r.expert_bias is not None}
    return result


def _plain_sgd(layout: Layout, options: Mapping[str, Any]) -> OptimizerConfig:
    """Settings of an optimizer without a state of its own."""
    return OptimizerConfig(
        optimizer="sgd",
        lr=options.get("learning_rate", 0.1),
        sgd_momentum=0.0,
        weight_decay=0.0,
        clip_grad=options.get("clip_grad", 0.0),
        bf16=layout.dtype is torch.bfloat16,
        use_distributed_optimizer=layout.use_distributed_optimizer,
    )


def _choose_schedule(config: TransformerConfig, layout: Layout) -> Counter[str]:
    """Set the schedule after construction, which would refuse one without an exchange; returns what it will count."""
    config.overlap_moe_expert_parallel_comm = layout.overlap
    config.delay_wgrad_compute = layout.overlap and layout.delays_wgrad
    counters: Counter[str] = Counter()
    config.count_func = counters.update
    return counters


def blocks_of_rank(batch: Batch, layout: Layout) -> list[list[int]]:
    """Sample numbers of each microbatch of this rank."""
    size = layout.micro_batch_size
    num_microbatches, rest = divmod(len(batch.tokens), size * layout.dp)
    assert rest == 0, f"{len(batch.tokens)} samples, {layout.dp} ranks, micro batch size {size}"
    starts = [(m * layout.dp + parallel_state.get_data_parallel_rank()) * size for m in range(num_microbatches)]
    return [list(range(start, start + size)) for start in starts]


def token_ids(samples: Sequence[int], seq_length: int) -> torch.Tensor:
    """Global ids of the rows of a microbatch, which run position by position: int64 [s * b]."""
    return (torch.tensor(samples)[None, :] * seq_length + torch.arange(seq_length)[:, None]).flatten()


def shard_token_ids(samples: Sequence[int], seq_length: int, layout: Layout) -> torch.Tensor:
    """Those of this rank's shard of its part of the sequence, int64 [s / cp / shards * b]; position by position."""
    ids = cut_for_rank(token_ids(samples, seq_length).view(seq_length, -1), 0)
    rank = parallel_state.get_tensor_model_parallel_rank() if layout.sequence_shards > 1 else 0
    return ids.chunk(layout.sequence_shards)[rank].flatten()


def cut_for_rank(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """This context-parallel rank's two chunks of 2 * cp along `dim`: [..., s, ...] -> [..., s / cp, ...]."""
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    if size == 1:
        return tensor
    chunks = tensor.chunk(2 * size, dim)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim)


def _record_routing(routers, ids_of_blocks, into) -> list[Any]:
    """Hooks that note the routing map of each forward pass that records, under global token ids."""
    hooks = []
    for layer, router in routers.items():
        remaining = iter(ids_of_blocks)

        def note(module, args, output, layer=layer, remaining=remaining):
            if not torch.is_grad_enabled():
                return  # the first pass of a recomputed layer
            ids = next(remaining).tolist()
            into[layer].update(zip(ids, output[1].clone(), strict=True))

        hooks.append(router.register_forward_hook(note))
    return hooks


def run_microbatches(chunks, batch, blocks, forced, delays_wgrad) -> torch.Tensor:
    """Clear the gradients, run all microbatches, finalise; returns [loss sum, tokens] of this rank.

    A block is the samples of a microbatch and the global ids of the tokens that this rank routes. Delayed weight
    gradients are computed when the microbatch's backward has ended.
    """
    seq_length = batch.tokens.shape[1]

    def forward_step(data_iterator, model):
        samples, ids = next(data_iterator)
        for routing in forced:
            routing.token_ids = ids
        positions = torch.arange(seq_length).expand(len(samples), seq_length)
        tokens, positions, labels, mask = (
            cut_for_rank(whole, 1)
            for whole in (batch.tokens[samples], positions, batch.labels[samples], batch.loss_mask[samples])
        )
        queue = WgradQueue() if delays_wgrad else None
        with deferring(queue):
            losses = model(tokens, positions, None, labels=labels)
        if queue is not None and losses.requires_grad:
            losses.register_hook(functools.partial(_flush_after_backward, queue))

        def loss_func(output):
            counted = mask.to(output.dtype)
            loss_sum, num_tokens = (output * counted).sum(), counted.sum().to(torch.int64)
            report = torch.stack([loss_sum.detach().double(), num_tokens.double()])
            return loss_sum, num_tokens, {"lm loss": report}

        return losses, loss_func

    for chunk in chunks:
        chunk.zero_grad_buffer()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(blocks) for _ in chunks],
        model=chunks,
        num_microbatches=len(blocks),
        seq_length=seq_length,
        micro_batch_size=len(blocks[0][0]),
    )
    return sum((report["lm loss"] for report in reports), torch.zeros(2, dtype=torch.float64))


def _flush_after_backward(queue: WgradQueue, grad: torch.Tensor) -> None:
    """Run the queue at the end of the backward pass that reaches the losses with `grad` [b, s]."""
    del grad
    torch.autograd.Variable._execution_engine.queue_callback(queue.flush)


def _build_chunks(config: TransformerConfig, shape: GptShape) -> list[GPTModel]:
    """The chunks of this rank."""
    arguments = {f.name: getattr(shape, f.name) for f in fields(shape)}

    def provide(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> GPTModel:
        spec = get_gpt_decoder_block_spec(config)
        return GPTModel(
            config, spec, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage, **arguments
        )

    return build_chunks(provide, num_chunks(config), ProcessGroupCollection.use_mpu_process_groups())


def load_weights(model: torch.nn.Module | Sequence[torch.nn.Module], weights: Mapping[str, torch.Tensor]) -> None:
    """Cut this rank's shards out of full tensors; every parameter must be given, and each shard fits."""
    chunks = [model] if isinstance(model, torch.nn.Module) else model
    parameters = {name: param for chunk in chunks for name, param in named_global_parameters(chunk)}
    for name, param in parameters.items():
        assert name in weights, f"no weight for {name}; known are {sorted(weights)}"
        part = local_slice(weights[name], tuple(param.shape), param_attrs(param))
        assert part.shape == param.shape, f"{name}: weight {tuple(part.shape)}, parameter {tuple(param.shape)}"
        with torch.no_grad():
            param.copy_(part)
    unused = set(weights) - set(parameters)
    if ProcessGroupCollection.use_mpu_process_groups().world is not None:
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, unused)
        unused = set.intersection(*by_rank)
    assert not unused, f"weights that no rank uses: {sorted(unused)}"


def shard_of(param: torch.nn.Parameter, tensor: torch.Tensor) -> tuple[torch.Tensor, Any, int]:
    """A local tensor with what is needed to put it back: (dim, parts that are cut one by one, rank of the cut)."""
    attrs = param_attrs(param)
    full = attrs.full_shape or tuple(param.shape)
    pieces = 1 if attrs.partition_dim is None else full[attrs.partition_dim] // param.shape[attrs.partition_dim]
    return tensor.detach().clone(), (attrs.partition_dim, attrs.num_parts, attrs.partition_rank), pieces
