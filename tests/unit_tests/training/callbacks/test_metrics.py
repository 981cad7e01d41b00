"""The training log callback: when it prints, what it averages, which scalars it writes."""

import argparse
import re
import time
from types import SimpleNamespace

import pytest
import torch

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.timers import Timers
from megatron.training import global_vars
from megatron.training.callbacks.metrics import TrainingLog, learning_rate, split_router_figures
from megatron.training.train_state import PutOff, StepResult, TrainState

GROUP = {"lr": 1e-3, "is_decoupled_lr": False}


class Writer:
    """Collects what would go to TensorBoard."""

    def __init__(self):
        self.rows = []

    def add_scalar(self, *row):
        self.rows.append(row)


@pytest.fixture
def run():
    args = argparse.Namespace(
        log_interval=2,
        moe_expert_rank_capacity_factor=None,
        train_iters=6,
        seq_length=8,
        tensorboard_dir=None,
        wandb_project="",
        tensorboard_log_interval=1,
        log_throughput=False,
        log_params_norm=False,
        log_state_hash=False,
        log_timers_to_tensorboard=False,
        log_memory_to_tensorboard=False,
        log_loss_scale_to_tensorboard=True,
        log_world_size_to_tensorboard=True,
        num_layers=1,
        moe_layer_freq=1,
        num_experts=None,
        hidden_size=4,
        padded_vocab_size=8,
        num_attention_heads=2,
        kv_channels=2,
        num_query_groups=2,
        ffn_hidden_size=8,
        swiglu=False,
        moe_ffn_hidden_size=None,
        moe_router_topk=2,
        moe_shared_expert_intermediate_size=None,
    )
    global_vars.reset()
    global_vars.set_timers(Timers(0, "max"))
    yield SimpleNamespace(
        args=args,
        state=TrainState(),
        model=[torch.nn.Linear(1, 1)],
        optimizer=SimpleNamespace(param_groups=[GROUP], get_loss_scale=lambda: torch.ones(1)),
        pg_collection=ProcessGroupCollection(),
        device=torch.device("cpu"),
        hidden_share=None,
        guarded_steps=None,
        put_off=PutOff(),
    )
    global_vars.reset()


def feed(run, losses, seconds=0.0):
    callback = TrainingLog()
    callback.on_train_start(run)
    for loss in losses:
        run.state.iteration += 1
        time.sleep(seconds)
        run.state.consumed_train_samples += 4
        callback.on_step_end(run, StepResult({"lm loss": loss}, grad_norm=0.5, batch_size=4))


def test_four_lines_for_six_steps_with_interval_two(run, capsys):
    feed(run, [4.0, 2.0, 0.0, 0.0, 3.0, 1.0])
    lines = capsys.readouterr().out.splitlines()
    pattern = r"iteration +(\d+)/.* learning rate: 1\.000000E-03 \|.* lm loss: (\S+) \|"
    found = [re.search(pattern, line).groups() for line in lines]
    assert [(int(i), float(loss)) for i, loss in found] == [(1, 4.0), (2, 3.0), (4, 0.0), (6, 2.0)]


def test_line_beside_captured_steps_is_printed_while_the_next_one_runs(run, capsys):
    run.guarded_steps = "captured"
    callback = TrainingLog()
    callback.on_train_start(run)

    def step(loss):
        run.put_off.do()  # what guarded steps do behind a launch
        run.state.iteration += 1
        callback.on_step_end(run, StepResult({"lm loss": loss}, grad_norm=0.5, batch_size=4))
        return re.findall(r"iteration +(\d+)/.* lm loss: (\S+) \|", capsys.readouterr().out)

    run.args.log_interval = 1
    printed = [step(loss) for loss in (4.0, 2.0, 3.0)]
    assert [[(int(i), float(loss)) for i, loss in lines] for lines in printed] == [[(1, 4.0)], [], [(2, 2.0)]]
    callback.on_evaluate_start(run)
    assert "iteration        3/" in capsys.readouterr().out
    callback.on_evaluate_end(run)
    step(1.0)
    callback.on_train_end(run)
    assert "iteration        4/" in capsys.readouterr().out


def test_same_flops_are_used_for_every_interval(run, capsys):
    run.args.log_throughput = True
    run.args.seq_length = 2**20
    feed(run, [1.0] * 4, seconds=0.01)
    text = capsys.readouterr().out
    milliseconds = [float(x) for x in re.findall(r"\(ms\): (\S+) \|", text)]
    tflops = [float(x) for x in re.findall(r"GPU\): (\S+) \|", text)]
    per_step = [t * ms for t, ms in zip(tflops, milliseconds, strict=True)]
    assert per_step == pytest.approx([per_step[0]] * 3, rel=0.1)


def test_scalars_have_megatron_keys_and_a_twin_against_samples(run):
    run.args.tensorboard_dir = "set"
    writer = Writer()
    global_vars.set_tensorboard_writer(writer)
    feed(run, [4.0])
    plain = {(key, value, step) for key, value, step in writer.rows if step == 1}
    assert plain == {
        ("learning-rate", 1e-3, 1),
        ("batch-size", 4, 1),
        ("lm loss", 4.0, 1),
        ("loss-scale", 1.0, 1),
        ("world-size", 1, 1),
        ("grad-norm", 0.5, 1),
    }
    assert ("lm loss vs samples", 4.0, 4) in writer.rows


def test_time_of_an_evaluation_is_not_counted(run):
    callback = TrainingLog()
    callback.on_train_start(run)
    callback.on_evaluate_start(run)
    timer = global_vars.get_timers()("interval-time")
    assert not timer.is_running
    callback.on_evaluate_end(run)
    assert timer.is_running


def test_rate_is_that_of_the_common_schedule():
    decoupled = {"lr": 5.0, "is_decoupled_lr": True}
    assert learning_rate([decoupled, GROUP]) == 1e-3
    assert learning_rate([decoupled]) == 5.0


def test_router_figures_are_losses_or_metrics():
    figures = {"load_balancing_loss": 1.0, "moe_load_imbalance": 1.5, "moe/load_balancing_loss_layer_0": 2.0}
    assert split_router_figures(figures) == ({"load_balancing_loss": 1.0}, {"moe_load_imbalance": 1.5})
