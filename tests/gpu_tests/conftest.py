"""Fixtures of the tests on a GPU."""

import gc

import pytest


@pytest.fixture
def start(capfd):
    """Run pretrain_gpt.py with flags in this process; returns the finished run and its log."""
    import torch

    from tests.common.captured_runs import MODEL
    from tests.common.training_runs import fresh_program, train

    def run(flags, callbacks=(), model=MODEL):
        try:
            with fresh_program():
                finished = train(model + flags, callbacks)
        finally:
            torch.use_deterministic_algorithms(False)
        out, err = capfd.readouterr()
        return finished, out + err

    return run


@pytest.fixture
def deterministic_device():
    """Deterministic kernels, where there are some; afterwards neither graphs, streams nor memory are left."""
    import torch

    from megatron.core import graph_state, streams

    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.cuda.synchronize()
    graph_state.reset()
    streams.reset()
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.cuda.empty_cache()
