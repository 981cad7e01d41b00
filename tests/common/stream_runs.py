"""Training runs of a few steps under the stream checker, on the ranks of the pool, from the flags of a launch line.

    checked_run(pool, [*TINY_MOE, "--overlap-moe-expert-parallel-comm"], world_size=2)      # "" or the report
    checked_run(pool, flags, 2, mutant="wrong_stream_event")                                # a mutant of mutants.py

The run is that of `pretrain_gpt.py`, except that the worker has joined its world already and samples are made up in
memory. A mutant is entered inside the job, before the model is built.
"""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from megatron.core.enums import ModelType
from megatron.core.errors import StreamOrderError
from megatron.core.utils.logging import get_rank
from tests.common import stream_mutants
from tests.common.call_sites import CallSite, deleted, find_call_sites, noted
from tests.common.mutants import replaced

SAMPLES = 64
_TINY_MOE = """
    --device cpu --transformer-impl local --num-layers 3 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 16
    --seq-length 8 --max-position-embeddings 8 --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 8 --moe-layer-freq [0,1,1] --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --bf16
    --micro-batch-size 1 --global-batch-size 6 --train-iters 2 --lr 1e-2 --tokenizer-type NullTokenizer
    --vocab-size 32 --make-vocab-size-divisible-by 1 --num-workers 0 --eval-iters 0 --log-interval 1 --mock-data
"""
TINY_MOE = tuple(_TINY_MOE.split())
"""Dense and MoE layers mixed on two ranks; what stands behind it on a command line wins."""


class _Samples(torch.utils.data.Dataset):
    """Random tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        stream = torch.randint(32, (self.length + 1,), generator=torch.Generator().manual_seed(index))
        return {
            "tokens": stream[:-1],
            "labels": stream[1:],
            "loss_mask": torch.ones(self.length),
            "position_ids": torch.arange(self.length),
        }


def checked_run(pool: Any, flags: Sequence[str], world_size: int = 2, mutant: str = "") -> str:
    """The report of all ranks; an empty string if nothing was found.

    A run that one of our own assertions stops reports that assertion.
    """
    return pool.run(_run_job, list(flags), mutant, world_size=world_size)[0]


def run_without(pool: Any, flags: Sequence[str], site: CallSite, world_size: int = 2, mutant: str = "") -> str:
    """The report of a run in which one call does nothing."""
    return pool.run(_deletion_job, list(flags), mutant, site, world_size=world_size)[0]


def calls_made(pool: Any, flags: Sequence[str], world_size: int = 2, mutant: str = "") -> set[CallSite]:
    """The calls that a run makes, on any rank."""
    return set().union(*pool.run(_coverage_job, list(flags), mutant, world_size=world_size))


def _entered(mutant: str) -> Any:
    return getattr(stream_mutants, mutant)() if mutant else nullcontext()


def _run_job(flags: list[str], mutant: str) -> str:
    with _entered(mutant):
        return report_of(flags)


def _deletion_job(flags: list[str], mutant: str, site: CallSite) -> str:
    with _entered(mutant), deleted(site):
        return report_of(flags)


def _coverage_job(flags: list[str], mutant: str) -> set[CallSite]:
    seen: set[CallSite] = set()
    with _entered(mutant), noted(find_call_sites(), seen):
        report = report_of(flags)
    assert not report, f"{' '.join(flags)}: {report}"
    return seen


def report_of(flags: Sequence[str]) -> str:
    """Train under the checker in this rank; what it reports."""
    try:
        train([*flags, "--check-streams"])
    except StreamOrderError as error:
        return str(error)
    except AssertionError as error:
        return f"stopped by an assertion: {error}"
    return ""


def train(flags: Sequence[str], extra: Sequence[Any] = ()) -> Any:
    """Train in this worker, whose default group exists; returns the finished run."""
    import pretrain_gpt
    from megatron.training import initialize
    from megatron.training.training import pretrain

    def provider(num_samples: Any) -> Any:
        return _Samples(8), None, None

    places = {"RANK": get_rank(), "WORLD_SIZE": torch.distributed.get_world_size()}
    try:
        os.environ.update({name: str(value) for name, value in places.items()})
        with (
            replaced(initialize.dist, "init_process_group", lambda *args, **kwargs: None),
            replaced(initialize, "check_rendezvous", lambda: None),
        ):
            return pretrain(
                provider,
                pretrain_gpt.model_provider,
                ModelType.encoder_or_decoder,
                pretrain_gpt.forward_step,
                argv=list(flags),
                callbacks=list(extra),
            )
    finally:
        for name in places:
            del os.environ[name]
