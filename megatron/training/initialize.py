"""From a parsed command line to a process that may compute and communicate.

Order: device, process groups, batch sizes, seeds, determinism. Under torchrun the rendezvous comes from its
environment; without it the process is a world of one. CPU runs talk through gloo; GPU runs through NCCL, and through
gloo for what lives on the host unless that is switched off.
"""

import argparse
import datetime
import logging

import torch
import torch.distributed as dist

from megatron.core import env, graph_state, num_microbatches_calculator, parallel_state, step_guard
from megatron.core.errors import ConfigError
from megatron.core.num_microbatches_calculator import build_batch_size_law, init_num_microbatches_calculator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_generator import DEFAULT_ORDER
from megatron.core.tensor_parallel import random
from megatron.core.timers import Timers
from megatron.core.tokenizers import build_tokenizer
from megatron.core.utils.collectives import last_collective
from megatron.core.utils.device import resolve_device
from megatron.core.utils.logging import get_logger, get_rank, log_single_rank, setup_logging
from megatron.training import global_vars
from megatron.training.writers import build_writers

logger = get_logger(__name__)

TP_PP_DP_ORDER = "tp-cp-ep-pp-dp"
"""Rank order of --use-tp-pp-dp-mapping."""


def initialize_megatron(args: argparse.Namespace) -> torch.device:
    """Make this process ready to build a model; returns the device it computes on.

    Sets the training globals. Every rank of the launch must call it with equal arguments.
    """
    setup_logging(args.logging_level if args.logging_level is not None else logging.INFO)
    global_vars.set_args(args)
    global_vars.set_timers(Timers(args.timing_log_level, args.timing_log_option))
    device = choose_device(args.device)
    choose_kernels(args)
    init_distributed(args, device)
    warn_about_queues(args, device)
    pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    init_num_microbatches_calculator(
        get_rank(),
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
        step_batch_size_schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )
    derive_lengths(args)
    random.set_random_seed(
        args.seed,
        data_parallel_random_init=args.data_parallel_random_init,
        device=device,
        pg_collection=pg_collection,
    )
    global_vars.set_tokenizer(build_tokenizer(args))
    build_writers(args)
    log_single_rank(logger, logging.INFO, f"device: {device}, world size: {dist.get_world_size()}")
    return device


def warn_about_queues(args: argparse.Namespace, device: torch.device) -> None:
    """Say if two streams would wait in one queue, so that what should overlap runs in the order of its launch."""
    if args.overlap_moe_expert_parallel_comm and device.type == "cuda" and env.device_max_connections() == 1:
        message = (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 with overlap_moe_expert_parallel_comm=True: all streams share one queue and "
            "little communication is hidden; set CUDA_DEVICE_MAX_CONNECTIONS=32 (--log-overlap shows the difference)."
        )
        log_single_rank(logger, logging.WARNING, message)


def derive_lengths(args: argparse.Namespace) -> None:
    """Fill the number of iterations of a run by samples, and the final batch size of a schedule of batch sizes.

    The iterations follow from playing the batch sizes through from the first sample.
    """
    law = build_batch_size_law(
        args.rampup_batch_size, args.global_batch_size, args.step_batch_size_schedule, args.seq_length
    )
    if args.global_batch_size is None:
        args.global_batch_size = law.all_batch_sizes()[-1]
    if args.train_samples is None:
        return
    consumed, args.train_iters = 0, 0
    while consumed + law.batch_size(consumed) <= args.train_samples:
        consumed += law.batch_size(consumed)
        args.train_iters += 1


def choose_device(name: str) -> torch.device:
    """Resolve "auto", "cpu" or "cuda" and make the GPU of the local rank current."""
    if name != "cpu" and torch.cuda.is_available():
        local_rank = env.local_rank()
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"LOCAL_RANK={local_rank} with {torch.cuda.device_count()} visible GPUs: each process of a host needs "
                "a GPU of its own; start fewer processes per host or pass --device cpu."
            )
        torch.cuda.set_device(local_rank)
    return resolve_device(name)


def choose_kernels(args: argparse.Namespace) -> None:
    """Tell torch which kernels it may use: repeatable ones only, and no bf16 partial sums, if that was asked for."""
    if args.deterministic_mode:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if args.disable_bf16_reduced_precision_matmul:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def check_rendezvous() -> None:
    """Refuse half of what a launcher sets.

    Raises: ConfigError that names the missing variables.
    """
    known = {"MASTER_ADDR": env.master_addr(), "MASTER_PORT": env.master_port()}
    missing = [name for name, value in known.items() if value is None]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={env.world_size()} with {', '.join(missing)} unset: ranks would not find each other; start "
            "with torchrun, which sets all of them, or unset WORLD_SIZE for a run of one process."
        )


def init_distributed(args: argparse.Namespace, device: torch.device) -> None:
    """Join the world of the launcher, or make one of a single process, then build all model-parallel groups."""
    if device.type == "cpu":
        backend = "gloo"
    elif args.distributed_backend == "gloo" or not args.use_gloo_process_groups:
        backend = args.distributed_backend
    else:
        backend = "cpu:gloo,cuda:nccl"
    timeout = datetime.timedelta(minutes=args.distributed_timeout_minutes)
    if env.world_size() is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        check_rendezvous()
        dist.init_process_group(backend, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        order=TP_PP_DP_ORDER if args.use_tp_pp_dp_mapping else DEFAULT_ORDER,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )


def shut_down() -> None:
    """Leave the process groups and forget everything that `initialize_megatron` set; a new run may follow.

    Graphs go first: a group does not end while a graph holds its communicator.
    """
    graph_state.reset()
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    parallel_state.reset()
    num_microbatches_calculator.reset()
    last_collective.reset()
    step_guard.reset()
    random.reset()
    global_vars.reset()
