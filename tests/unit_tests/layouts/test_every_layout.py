"""One step of a mixture in all layouts up to four ranks against the reference, in fp64, and in fp32 as one call."""

import dataclasses

import pytest
import torch

from tests.common.collective_log import compare_logs
from tests.unit_tests.layouts import cases, test_context_parallel_sweep, test_tensor_parallel_sweep
from tests.unit_tests.layouts.cases import check_against_reference, make_case, masked_batch
from tests.unit_tests.layouts.grid import CHOSEN, EXPERTS, SEQ_LENGTH, SHAPE, UNEVEN, every_cell, every_layout, pairs_of
from tests.unit_tests.layouts.test_layout_sweep import fp32_bound

BATCH = masked_batch(UNEVEN, seq_length=SEQ_LENGTH)
MAX_LAYOUTS = 60


def check(pool, layout, is_per_token, tolerance=cases.TOLERANCE):
    case = make_case(SHAPE, **EXPERTS, calculate_per_token_loss=is_per_token)
    got = check_against_reference(pool, case, layout, BATCH, tolerance=tolerance)
    assert compare_logs(got.logs) == []


def check_in_fp32(pool, layout, is_per_token):
    grouped = dataclasses.replace(layout, is_grouped=True, dtype=torch.float32)
    # an element of a weight gradient sums over tokens, each a sum over the width
    check(pool, grouped, is_per_token, tolerance=fp32_bound(4 * SEQ_LENGTH * 8))


@pytest.mark.parametrize(("layout", "is_per_token"), CHOSEN, ids=str)
def test_chosen_layout_equals_reference(pool, layout, is_per_token):
    check(pool, layout, is_per_token)


@pytest.mark.parametrize(("layout", "is_per_token"), CHOSEN[::5], ids=str)
def test_chosen_layout_in_fp32_equals_reference(pool, layout, is_per_token):
    check_in_fp32(pool, layout, is_per_token)


def test_chosen_layouts_hold_every_pair_of_choices():
    wanted = set().union(*map(pairs_of, every_cell()))
    assert len(wanted) == 316
    assert wanted - set().union(*map(pairs_of, CHOSEN)) == set()


@pytest.mark.full
@pytest.mark.parametrize("is_per_token", [False, True], ids=["mean_of_means", "per_token"])
@pytest.mark.parametrize("layout", [*every_layout()], ids=str)
def test_every_layout_equals_reference(pool, layout, is_per_token):
    check(pool, layout, is_per_token)


@pytest.mark.full
@pytest.mark.parametrize("layout", [*every_layout()], ids=str)
def test_every_layout_in_fp32_equals_reference(pool, layout):
    check_in_fp32(pool, layout, is_per_token=True)


def test_layouts_differ_and_those_for_every_change_are_few():
    every = [*every_layout()]
    assert len(set(every)) == len(every)
    lists = (
        [layout for layout, _ in CHOSEN],
        test_tensor_parallel_sweep.MOE_LAYOUTS,
        test_context_parallel_sweep.LAYOUTS,
    )
    named = [value for value in vars(cases).values() if isinstance(value, cases.Layout)]
    assert len({*named, *(layout for layouts in lists for layout in layouts)}) <= MAX_LAYOUTS
