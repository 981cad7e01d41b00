"""A small training run that is saved in one layout and goes on in others, through the run's own save and load.

saved = pool.run(train_and_save, case, layout, folder, world_size=...)        # [Passage] of each rank
loaded = pool.run(load_and_go_on, case, other, {"a": folder}, world_size=...)  # [{"a": Passage}] of each rank
assert_same_state(join_passages(saved), join_passages([rank["a"] for rank in loaded]))
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.module_api.global_names import named_global_buffers, named_global_parameters
from megatron.core.optimizer import OptimizerConfig, OptimizerParamScheduler, get_megatron_optimizer
from megatron.core.pipeline_layout import num_chunks
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.checkpointing import CheckpointWriter, load_checkpoint
from megatron.training.configs.checkpoint import CheckpointConfig
from megatron.training.model_setup import build_chunks
from megatron.training.train_state import TrainingRun
from tests.common.layouts import (
    Layout,
    ModelCase,
    blocks_of_rank,
    join_shards,
    run_microbatches,
    shard_of,
    shard_token_ids,
)
from tests.common.reference import Batch

NUM_SAMPLES, SEQ_LENGTH, NUM_TOKENS = 2, 8, 13
STEPS_BEFORE, STEPS_AFTER = 2, 3
WHOLE = (None, 1, 0)
"""What `join_shards` needs to know of a tensor that nobody cuts."""


@dataclass
class Passage:
    """One side of a checkpoint: the state at the border and the losses of the steps after it."""

    state: dict[str, Any] = field(default_factory=dict)
    """{kind and global name: shard as `join_shards` takes it}; of joined passages the whole tensors"""
    losses: list[Any] = field(default_factory=list)
    """[sum of token losses, tokens] of this rank for each step; of joined passages their ratio"""


def build_run(case: ModelCase, layout: Layout, **settings: Any) -> TrainingRun:
    """Model, optimizer and schedule of this rank; `settings` are fields of CheckpointConfig."""
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    config = case.config(layout)
    config.finalize_model_grads_func = finalize_model_grads
    groups = ProcessGroupCollection.use_mpu_process_groups()
    shape = {f.name: getattr(case.shape, f.name) for f in fields(case.shape)}
    shape |= {"vocab_size": 14 if layout.tp == 1 else 16, "true_vocab_size": NUM_TOKENS}

    def provide(**place: Any) -> GPTModel:
        return GPTModel(config, get_gpt_decoder_block_spec(config), **place, **shape)

    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.use_distributed_optimizer,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
        bucket_size=layout.bucket_size,
    )
    modules = build_chunks(provide, num_chunks(config), groups)
    chunks: list[Any] = [DistributedDataParallel(config, ddp_config, module) for module in modules]
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        clip_grad=0.5,
        bf16=layout.dtype is torch.bfloat16,
        use_distributed_optimizer=layout.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(optimizer_config, chunks)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=0.01,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=10 * NUM_SAMPLES,
        lr_decay_style="linear",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=10 * NUM_SAMPLES,
        wd_incr_style="constant",
    )
    args = argparse.Namespace(**dataclasses.asdict(CheckpointConfig(**settings)))
    device = torch.device("cpu")
    return TrainingRun(args, chunks, optimizer, scheduler, config, groups, device, lambda *_: None)


def take_step(run: TrainingRun, layout: Layout) -> torch.Tensor:
    """One step on the samples that its number stands for; [sum of token losses, tokens] of this rank."""
    batch = Batch.random(NUM_SAMPLES, SEQ_LENGTH, NUM_TOKENS, seed=run.state.iteration)
    blocks = blocks_of_rank(batch, layout)
    ids = [shard_token_ids(block, SEQ_LENGTH, layout) for block in blocks]
    sums = run_microbatches(run.model, batch, list(zip(blocks, ids, strict=True)), [], False)
    run.optimizer.step()
    run.scheduler.step(increment=NUM_SAMPLES)
    run.state.iteration += 1
    run.state.consumed_train_samples += NUM_SAMPLES
    return sums


def note_state(run: TrainingRun) -> dict[str, Any]:
    """Weights, buffers, moments, main copies, step counts and learning rate of this rank, without a look at boxes."""
    state: dict[str, Any] = {}
    for chunk in run.model:
        chunk.finish_param_sync()
        state |= {f"weight {name}": shard_of(p, p.detach()) for name, p in named_global_parameters(chunk)}
        state |= {f"buffer {name}": (b.clone(), WHOLE, 1) for name, b in named_global_buffers(chunk)}
    for name, param, tensors, _ in run.optimizer.whole_state():
        for kind, tensor in tensors.items():
            if kind != "main_grad":
                shard = shard_of(param, tensor) if tensor.dim() else (tensor.clone(), WHOLE, 1)
                state[f"{kind} {name}"] = shard
    lr = torch.tensor(run.optimizer.param_groups[0]["lr"], dtype=torch.float64)
    return state | {"lr": (lr, WHOLE, 1)}


def train_and_save(case: ModelCase, layout: Layout, folder: Path, settings: Mapping[str, Any]) -> Passage:
    """A job: some steps, a save, some more steps."""
    run = build_run(case, layout, save=str(folder), **settings)
    for _ in range(STEPS_BEFORE):
        take_step(run, layout)
    save_run(run)
    return Passage(note_state(run), [take_step(run, layout) for _ in range(STEPS_AFTER)])


def save_run(run: TrainingRun) -> None:
    """Save and wait until it is done."""
    writer = CheckpointWriter(run.args)
    writer.save(run)
    writer.finish()
    writer.close()


def load_and_go_on(
    case: ModelCase, layout: Layout, sources: Mapping[str, Path], settings: Mapping[str, Any]
) -> dict[str, Passage]:
    """A job: load each of the checkpoints in turn into the same run, and go on from it for some steps."""
    run = build_run(case, layout, load="set below", **settings)
    passages = {}
    for name, folder in sources.items():
        run.args.load = str(folder)
        load_checkpoint(run)()
        assert run.state.iteration == STEPS_BEFORE, f"{name}: at step {run.state.iteration}"
        passages[name] = Passage(note_state(run), [take_step(run, layout) for _ in range(STEPS_AFTER)])
    return passages


def load_and_save(case: ModelCase, layout: Layout, source: Path, target: Path, settings: Mapping[str, Any]) -> None:
    """A job: load a checkpoint and save it again."""
    run = build_run(case, layout, load=str(source), save=str(target), **settings)
    load_checkpoint(run)()
    save_run(run)


def join_passages(ranks: Sequence[Passage]) -> Passage:
    """Whole tensors without the filler rows of the vocabulary, and mean losses; copies of a tensor must be equal."""
    state = join_shards("state", [rank.state for rank in ranks])
    for name, tensor in state.items():
        if tensor.dim() == 2 and name.endswith(("word_embeddings.weight", "output_layer.weight")):
            state[name] = tensor[:NUM_TOKENS]
    sums = [torch.stack([rank.losses[step] for rank in ranks]).sum(0) for step in range(STEPS_AFTER)]
    return Passage(state, [float(total / count) for total, count in sums])


def differences(saved: Passage, loaded: Passage) -> list[str]:
    """Names of what is not equal bit for bit, or is on one side only."""
    names = sorted(saved.state.keys() | loaded.state.keys())
    return [
        name
        for name in names
        if name not in saved.state
        or name not in loaded.state
        or saved.state[name].dtype != loaded.state[name].dtype
        or not torch.equal(saved.state[name], loaded.state[name])
    ]
