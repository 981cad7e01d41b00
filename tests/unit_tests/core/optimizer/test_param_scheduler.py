"""Rates and decays over samples; T55 and T57 of the known traps."""

import pytest
import torch

from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.optimizer import OptimizerConfig, OptimizerParamScheduler, get_megatron_optimizer


class Groups:
    """Stands for an optimizer: two groups, the second without weight decay."""

    def __init__(self):
        self.param_groups = [{"wd_mult": 1.0}, {"wd_mult": 0.0}]


def build(optimizer=None, **changes):
    settings = {
        "init_lr": 0.0,
        "max_lr": 1.0,
        "min_lr": 0.1,
        "lr_warmup_steps": 10,
        "lr_decay_steps": 100,
        "lr_decay_style": "linear",
        "start_wd": 0.5,
        "end_wd": 0.5,
        "wd_incr_steps": 100,
        "wd_incr_style": "constant",
    }
    return OptimizerParamScheduler(optimizer or Groups(), **{**settings, **changes})


def rates_at(scheduler, points):
    """The rate at each number of samples, reached by one step from the point before."""
    rates = []
    for point in points:
        scheduler.step(point - scheduler.num_steps)
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
    return rates


WSD = {"lr_decay_style": "WSD", "wsd_decay_steps": 20, "lr_wsd_decay_style": "linear"}


@pytest.mark.parametrize("samples_per_step", [1, 32])
@pytest.mark.parametrize(
    ("settings", "points", "expected"),
    [
        ({"lr_decay_style": "constant"}, [0, 5, 10, 55, 100, 200], [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
        ({"lr_decay_style": "linear"}, [0, 5, 10, 55, 90, 100, 200], [0.0, 0.5, 1.0, 0.55, 0.2, 0.1, 0.1]),
        ({"lr_decay_style": "cosine"}, [0, 5, 10, 55, 100, 200], [0.0, 0.5, 1.0, 0.55, 0.1, 0.1]),
        (WSD, [0, 5, 10, 55, 80, 90, 100, 200], [0.0, 0.5, 1.0, 1.0, 1.0, 0.55, 0.1, 0.1]),
    ],
    ids=["constant", "linear", "cosine", "WSD"],
)
def test_decay_length_includes_the_warmup(settings, points, expected, samples_per_step):
    lengths = {"lr_warmup_steps": 10, "lr_decay_steps": 100, **settings}
    scaled = {name: value * samples_per_step if name.endswith("_steps") else value for name, value in lengths.items()}
    rates = rates_at(build(**scaled), [point * samples_per_step for point in points])
    assert rates == pytest.approx(expected, rel=1e-12)


def test_cosine_is_above_its_minimum_before_the_end():
    (rate,) = rates_at(build(lr_decay_style="cosine"), [90])
    assert rate == pytest.approx(0.12713832064634126, rel=1e-9)


def test_inverse_square_root_continues_the_warmup_and_stops_at_the_minimum():
    scheduler = build(lr_decay_style="inverse-square-root", lr_warmup_steps=4, lr_decay_steps=1000)
    assert rates_at(scheduler, [4, 16, 64, 400, 900]) == pytest.approx([1.0, 0.5, 0.25, 0.1, 0.1])


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("linear", [0.775, 0.55]),
        ("cosine", [0.8681980515339464, 0.55]),
        ("exponential", [0.7136135474566861, 0.47279220613578565]),
        ("minus_sqrt", [0.55, 0.3636038969321073]),
    ],
)
def test_anneal_shapes_at_a_quarter_and_half(shape, expected):
    scheduler = build(**{**WSD, "lr_wsd_decay_style": shape})
    assert rates_at(scheduler, [85, 90]) == pytest.approx(expected, rel=1e-12)
    assert rates_at(scheduler, [100]) == pytest.approx([0.1])


def test_warmup_starts_at_its_initial_rate():
    assert rates_at(build(init_lr=0.2), [0, 5, 10]) == pytest.approx([0.2, 0.6, 1.0])


@pytest.mark.parametrize(("warmup", "rate"), [(10, 0.25), (0, 1.0)])
def test_groups_have_the_values_of_sample_zero_from_the_start(warmup, rate):
    first, second = build(init_lr=0.25, lr_warmup_steps=warmup).optimizer.param_groups
    assert (first["lr"], second["lr"]) == (rate, rate)
    assert (first["weight_decay"], second["weight_decay"]) == (0.5, 0.0)


@pytest.mark.parametrize(
    ("style", "expected"), [("linear", [0.0, 0.1, 0.2, 0.4, 0.4]), ("cosine", [0.0, 0.05857864376269, 0.2, 0.4, 0.4])]
)
def test_weight_decay_grows_from_start_to_end(style, expected):
    scheduler = build(start_wd=0.0, end_wd=0.4, wd_incr_style=style)
    decays = []
    for point in (0, 25, 50, 100, 150):
        scheduler.step(point - scheduler.num_steps)
        decays.append(scheduler.optimizer.param_groups[0]["weight_decay"])
    assert decays == pytest.approx(expected, rel=1e-9)
    assert scheduler.optimizer.param_groups[1]["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_decay_style": "step"}, "lr_decay_style='step': not a known style; use one of constant"),
        ({"min_lr": 2.0}, "min_lr=2.0 with lr=1.0: the rate decays to min_lr"),
        ({"init_lr": 2.0}, "lr_warmup_init=2.0 with lr=1.0: the warm-up rises"),
        (
            {"lr_warmup_steps": 100},
            "lr_warmup=100 with lr_decay=100 \\(samples\\): the decay length includes the warm-up",
        ),
        ({"start_wd": 0.1}, "weight_decay_incr_style='constant' with start_weight_decay=0.1 and end_weight_decay=0.5"),
        ({"start_wd": 0.6}, "start_weight_decay=0.6 with end_weight_decay=0.5: the decay grows"),
        ({"lr_decay_style": "WSD"}, "lr_wsd_decay_style=None: not a known style"),
        ({**WSD, "wsd_decay_steps": 101}, "lr_wsd_decay=101 with lr_decay=100"),
        (
            {"use_checkpoint_opt_param_scheduler": True, "override_opt_param_scheduler": True},
            "use_checkpoint_opt_param_scheduler=True with override_opt_param_scheduler=True",
        ),
    ],
)
def test_settings_without_a_schedule_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        build(**changes)


# Resume: dense, no-decay, expert and decoupled groups of a real optimizer.


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Parameter(torch.ones(2, 2))
        self.norm = torch.nn.Parameter(torch.ones(2))
        self.expert = torch.nn.Parameter(torch.ones(2, 2))
        self.expert.allreduce = False
        self.output = torch.nn.Parameter(torch.ones(2, 2))
        self.output.is_embedding_or_output_parameter = True


def run(max_lr, min_lr, style, decoupled, saved=None, **modes):
    """A run of GBS 1 with decay length 10, resumed from `saved` if given."""
    config = OptimizerConfig(lr=max_lr, min_lr=min_lr, decoupled_lr=decoupled)
    optimizer = get_megatron_optimizer(config, [Model()])
    scheduler = build(
        optimizer, max_lr=max_lr, min_lr=min_lr, lr_warmup_steps=0, lr_decay_steps=10, lr_decay_style=style, **modes
    )
    if saved is not None:
        optimizer.load_state_dict(saved[0])
        scheduler.load_state_dict(saved[1])
    return optimizer, scheduler


def saved_after_five_steps():
    optimizer, scheduler = run(6e-4, 0.0, "linear", decoupled=1e-3)
    for _ in range(5):
        scheduler.step(1)
    return optimizer.state_dict(), scheduler.state_dict()


def rates_of_steps_six_and_seven(optimizer, scheduler):
    """(common rates, decoupled rates); all groups of a kind must agree."""
    common, decoupled = [], []
    for _ in range(2):
        common.append({group["lr"] for group in optimizer.param_groups if not group["is_decoupled_lr"]})
        decoupled.append({group["lr"] for group in optimizer.param_groups if group["is_decoupled_lr"]})
        scheduler.step(1)
    assert len(optimizer.param_groups) == 4
    return [rate for (rate,) in common], [rate for (rate,) in decoupled]


def test_override_follows_the_new_schedule_in_every_group():
    resumed = run(3e-4, 3e-5, "cosine", 2e-3, saved_after_five_steps(), override_opt_param_scheduler=True)
    common, decoupled = rates_of_steps_six_and_seven(*resumed)
    assert common == pytest.approx([1.65e-4, 1.232827057593821e-4], rel=1e-9)
    assert decoupled == pytest.approx([1.015e-3, 7.106182605406768e-4], rel=1e-9)


def test_use_checkpoint_follows_the_old_schedule_in_every_group():
    resumed = run(3e-4, 3e-5, "cosine", 2e-3, saved_after_five_steps(), use_checkpoint_opt_param_scheduler=True)
    common, decoupled = rates_of_steps_six_and_seven(*resumed)
    assert common == pytest.approx([3e-4, 2.4e-4], rel=1e-12)
    assert decoupled == pytest.approx([5e-4, 4e-4], rel=1e-12)


def test_equal_settings_resume_without_a_flag():
    common, _ = rates_of_steps_six_and_seven(*run(6e-4, 0.0, "linear", 1e-3, saved_after_five_steps()))
    assert common == pytest.approx([3e-4, 2.4e-4], rel=1e-12)


def test_differing_settings_without_a_flag_are_refused_with_both_values():
    with pytest.raises(CheckpointError) as error:
        run(3e-4, 3e-5, "cosine", 1e-3, saved_after_five_steps())
    text = str(error.value)
    assert "max_lr: 0.0003 here, 0.0006 saved; min_lr: 3e-05 here, 0.0 saved" in text
    assert "lr_decay_style: cosine here, linear saved" in text
    assert "--override-opt-param-scheduler" in text
