"""Reading runs, drawing them and comparing them."""

import json
import math

import pytest

from tools.loss_compare import main as compare
from tools.loss_compare import relative_differences
from tools.plot_loss import build_picture
from tools.plot_loss import main as plot
from tools.run_metrics import parse_log, parse_state_hashes, read_golden, read_run

LINE = (
    " [2031-05-04 09:08:07.123456] iteration {step:8d}/     100 | consumed samples:         1280 | "
    "elapsed time per iteration (ms): 812.4 | learning rate: 2.850000E-04 | lm loss: {loss} | "
    "number of nan iterations:   0 | state hash: {hash} |\n"
)
EVALUATION = (
    "----\n validation loss at iteration 2 on test set | lm loss value: 7.214003E+00 | lm loss PPL: 1.0E+03 | \n----\n"
)


def log(losses, first_hash="0123456789abcdef"):
    lines = (LINE.format(step=i, loss=loss, hash=first_hash) for i, loss in enumerate(losses, 1))
    return "noise\n" + "".join(lines) + EVALUATION


def test_log_gives_every_piece_and_the_evaluation():
    metrics = parse_log(log(["7.5E+00", "NAN"]))
    assert metrics["lm loss"][1] == 7.5
    assert math.isnan(metrics["lm loss"][2])
    assert metrics["learning rate"] == {1: 2.85e-4, 2: 2.85e-4}
    assert metrics["lm loss validation"] == {2: 7.214003}
    assert "state hash" not in metrics


def test_state_hashes_are_read_by_iteration():
    assert parse_state_hashes(log(["1.0"])) == {1: "0123456789abcdef"}


def test_golden_steps_without_value_are_nan(tmp_path):
    file = tmp_path / "golden.json"
    values = {"1": 10.5, "2": "nan"}
    file.write_text(json.dumps({"lm loss": {"start_step": 1, "end_step": 2, "step_interval": 1, "values": values}}))
    golden = read_golden(file)["lm loss"]
    assert golden[1] == 10.5
    assert math.isnan(golden[2])


def test_tensorboard_scalars_are_read_by_step(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(log_dir=str(tmp_path))
    writer.add_scalar("lm loss", 1.5, 3)
    writer.close()
    assert read_run(tmp_path) == {"lm loss": {3: 1.5}}


def test_picture_holds_the_curves_dots_and_levels(tmp_path):
    file = tmp_path / "run.log"
    file.write_text(log(["3.0", "2.0"]))
    picture = build_picture({"run": file}, "lm loss", {"bigram": 2.3})
    assert picture.curves == {"run": {1: 3.0, 2: 2.0}}
    assert picture.dots == {"run, validation": {2: 7.214003}}
    assert picture.levels == {"bigram": 2.3}


def test_picture_joins_logs_events_and_goldens(tmp_path):
    writer_module = pytest.importorskip("torch.utils.tensorboard")
    file, golden, events = tmp_path / "run.log", tmp_path / "golden.json", tmp_path / "tensorboard"
    file.write_text(log(["3.0", "2.0"]))
    golden.write_text(json.dumps({"lm loss": {"start_step": 1, "end_step": 2, "values": {"1": 3.5, "2": "nan"}}}))
    with writer_module.SummaryWriter(log_dir=str(events)) as writer:
        writer.add_scalar("lm loss", 2.5, 2)
        writer.add_scalar("lm loss", 2.75, 1)
        writer.add_scalar("lm loss validation", 2.25, 2)
    picture = build_picture({"log": file, "events": events, "golden": golden}, "lm loss", {})
    assert picture.curves["log"] == {1: 3.0, 2: 2.0}
    assert list(picture.curves["events"].items()) == [(1, 2.75), (2, 2.5)]
    assert picture.curves["golden"][1] == 3.5
    assert math.isnan(picture.curves["golden"][2])
    assert picture.dots == {"log, validation": {2: 7.214003}, "events, validation": {2: 2.25}}


def test_missing_metric_is_answered_with_those_that_exist(tmp_path):
    file = tmp_path / "run.log"
    file.write_text(log(["3.0"]))
    with pytest.raises(ValueError, match=r"has no metric 'nonsense'; it has .*lm loss"):
        build_picture({"run": file}, "nonsense", {})


def test_plot_writes_a_png_and_prints_its_path(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file, out = tmp_path / "run.log", tmp_path / "deep" / "loss.png"
    file.write_text(log(["3.0", "2.0"]))
    assert plot([str(file), "--out", str(out), "--level", "bigram=2.3"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("losses", "options", "code"),
    [
        (["3.0", "2.0"], [], 0),
        (["3.0", "2.0001"], [], 1),
        (["3.0", "2.0001"], ["--rtol", "1e-3"], 0),
        (["3.0"], ["--rtol", "1e-3"], 1),
        (["3.0", "NAN"], ["--rtol", "1e-3"], 1),
    ],
)
def test_comparison_fails_on_any_difference_beyond_the_bound(tmp_path, losses, options, code):
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    first.write_text(log(["3.0", "2.0"]))
    second.write_text(log(losses))
    assert compare([str(first), str(second), *options]) == code


def test_nan_on_both_sides_is_a_difference():
    assert relative_differences({1: math.nan}, {1: math.nan}) == {1: math.inf}


def test_different_hash_is_reported(tmp_path, capsys):
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    first.write_text(log(["3.0"]))
    second.write_text(log(["3.0"], first_hash="0" * 16))
    assert compare([str(first), str(first), "--state-hash"]) == 0
    assert compare([str(first), str(second), "--state-hash"]) == 1
    assert "different at [1]" in capsys.readouterr().out
