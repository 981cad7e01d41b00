"""Which places a rank takes."""

import itertools

import pytest
import torch

from megatron.core.datasets.samplers import (
    FullValidationSampler,
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)
from megatron.core.errors import DataError


def steps_of_all_ranks(sampler, total, consumed, mbs, dp, **options):
    """[rank][step] -> places."""
    return [list(sampler(total, consumed, mbs, rank, dp, **options)) for rank in range(dp)]


def test_rank_takes_its_micro_batch_of_each_step():
    rank0, rank1 = steps_of_all_ranks(MegatronPretrainingSampler, 13, 2, 2, 2)
    assert rank0 == [[2, 3], [6, 7]]
    assert rank1 == [[4, 5], [8, 9]]


@pytest.mark.parametrize(("mbs", "dp"), [(1, 1), (4, 1), (2, 2), (1, 4), (1, 2)])
def test_order_does_not_depend_on_the_layout(mbs, dp):
    ranks = steps_of_all_ranks(MegatronPretrainingSampler, 40, 8, mbs, dp)
    order = [place for step in zip(*ranks, strict=True) for batch in step for place in batch]
    assert order == list(range(8, 40))


def test_data_that_is_used_up_is_refused():
    with pytest.raises(DataError, match="consumed_samples=10: the data has 10 samples, none is left"):
        MegatronPretrainingSampler(10, 10, 1, 0, 1)
    with pytest.raises(DataError, match="total_samples=0: there is no sample"):
        MegatronPretrainingSampler(0, 0, 1, 0, 1)


def test_sharded_rank_permutes_its_own_bucket():
    rank0, rank1 = steps_of_all_ranks(MegatronPretrainingRandomSampler, 11, 0, 2, 2)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(0)).tolist()
    assert rank0 == [order[:2], order[2:]]
    assert rank1 == [[place + 4 for place in order[:2]], [place + 4 for place in order[2:]]]


def test_unsharded_ranks_take_turns_in_one_permutation():
    rank0, rank1 = steps_of_all_ranks(MegatronPretrainingRandomSampler, 11, 0, 2, 2, data_sharding=False)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0)).tolist()
    assert rank0 == [order[0:4:2], order[4:8:2]]
    assert rank1 == [order[1:4:2], order[5:8:2]]


@pytest.mark.parametrize("sharding", [True, False])
def test_all_ranks_of_a_cyclic_order_have_equally_many_steps(sharding):
    ranks = steps_of_all_ranks(MegatronPretrainingRandomSampler, 14, 0, 2, 4, data_sharding=sharding)
    assert {len(steps) for steps in ranks} == {1}


@pytest.mark.parametrize("sharding", [True, False])
def test_cyclic_resume_continues_the_order(sharding):
    whole = steps_of_all_ranks(MegatronPretrainingRandomSampler, 50, 0, 2, 2, data_sharding=sharding)
    rest = steps_of_all_ranks(MegatronPretrainingRandomSampler, 50, 12, 2, 2, data_sharding=sharding)
    assert [steps[3:] for steps in whole] == rest


def test_cyclic_epochs_differ_and_the_epoch_follows_from_consumed_samples():
    sampler = MegatronPretrainingRandomSampler(20, 0, 2, 0, 1)
    first, second = list(sampler), list(sampler)
    assert sampler.consumed_samples == 40
    assert first != second
    assert [sorted(itertools.chain(*epoch)) for epoch in (first, second)] == [list(range(20))] * 2
    assert list(MegatronPretrainingRandomSampler(20, 20, 2, 0, 1)) == second


def test_cyclic_resume_between_steps_is_refused():
    with pytest.raises(DataError, match="6 samples into the epoch is no multiple of the 4"):
        list(MegatronPretrainingRandomSampler(20, 26, 2, 0, 2))


def test_cyclic_order_of_too_few_samples_is_refused():
    with pytest.raises(DataError, match="total_samples=3: a step takes micro_batch_size=2 times 2"):
        MegatronPretrainingRandomSampler(3, 0, 2, 0, 2)


def test_full_validation_takes_single_samples_in_turn():
    rank0, rank1 = steps_of_all_ranks(FullValidationSampler, 5, 0, 1, 2)
    assert rank0 == [[0], [2], [4]]
    assert rank1 == [[1], [3], [None]]
    assert len(FullValidationSampler(5, 0, 1, 1, 2)) == 3
