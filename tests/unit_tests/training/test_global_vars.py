"""The training globals: set, read, forgotten."""

import argparse

import pytest

from megatron.training import global_vars


@pytest.fixture(autouse=True)
def _clean():
    global_vars.reset()
    yield
    global_vars.reset()


def test_unset_value_is_named():
    with pytest.raises(RuntimeError, match="args=None: training globals are not set"):
        global_vars.get_args()


def test_reset_forgets_everything():
    args = argparse.Namespace(seed=1)
    global_vars.set_args(args)
    global_vars.set_tensorboard_writer("writer")
    assert global_vars.get_args() is args
    global_vars.reset()
    assert global_vars.get_tensorboard_writer() is None
    with pytest.raises(RuntimeError, match="args"):
        global_vars.get_args()
