"""The log line, byte for byte."""

from datetime import datetime

import pytest

from megatron.training.log_line import LogValues, format_log_line

NOW = datetime(2031, 5, 4, 9, 8, 7, 123456)
REQUIRED = {
    "iteration": 20,
    "train_iters": 100,
    "consumed_samples": 1280,
    "elapsed_ms_per_iteration": 812.4,
    "learning_rate": 2.85e-4,
    "global_batch_size": 64,
    "losses": {"lm loss": 7.315204, "load_balancing_loss": 1.010042},
    "loss_scale": 1.0,
    "num_skipped_iterations": 0,
    "num_nan_iterations": 0,
}


def test_line_equals_the_known_example():
    values = LogValues(**REQUIRED, tflops_per_gpu=401.7, grad_norm=1.874, num_zeros=0)
    assert format_log_line(values, NOW) == (
        " [2031-05-04 09:08:07.123456] iteration       20/     100 | consumed samples:         1280 | "
        "elapsed time per iteration (ms): 812.4 | throughput per GPU (TFLOP/s/GPU): 401.7 | "
        "learning rate: 2.850000E-04 | global batch size:    64 | lm loss: 7.315204E+00 | "
        "load_balancing_loss: 1.010042E+00 | loss scale: 1.0 | grad norm: 1.874 | num zeros: 0 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_optional_pieces_stand_in_order():
    values = LogValues(
        **REQUIRED,
        skipped_samples=64,
        moe_metrics={"load imbalance": 1.234},
        params_norm=12.3456,
        tokens_per_second=1234.5,
        num_overflows=2,
        row_head_room=-0.125,
        state_hash="0123456789abcdef",
    )
    assert format_log_line(values, NOW) == (
        " [2031-05-04 09:08:07.123456] iteration       20/     100 | consumed samples:         1280 | "
        "skipped samples:           64 | elapsed time per iteration (ms): 812.4 | "
        "learning rate: 2.850000E-04 | global batch size:    64 | lm loss: 7.315204E+00 | "
        "load_balancing_loss: 1.010042E+00 | load imbalance: 1.23 | loss scale: 1.0 | params norm: 12.346 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 | tokens per second: 1234 | "
        "row overflows: 2 | row head room (%): -12.5 | "
        "state hash: 0123456789abcdef |"
    )


@pytest.mark.parametrize(
    ("loss", "text"), [(float("nan"), "NAN"), (float("inf"), "INF"), (-0.5, "-5.000000E-01"), (0.0, "0.000000E+00")]
)
def test_every_loss_value_is_printed(loss, text):
    line = format_log_line(LogValues(**REQUIRED | {"losses": {"lm loss": loss}}), NOW)
    assert f" lm loss: {text} |" in line
