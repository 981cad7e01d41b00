"""The quickstart's verdict: what passes and what does not."""

import math

import pytest

from tools.quickstart_verdict import judge, main

GOOD = {"lm loss validation": {200: 2.5, 600: 1.8}, "moe_load_imbalance_max": {20: 3.0, 600: 1.4}}


def passes(**changes):
    return all(check.holds for check in judge(GOOD | changes, bigram=2.3))


def test_run_that_learned_passes():
    assert passes()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"lm loss validation": {600: 2.01}}, id="loss-above-two"),
        pytest.param({"lm loss validation": {600: math.nan}}, id="loss-nan"),
        pytest.param({"lm loss validation": {}}, id="no-evaluation"),
        pytest.param({"moe_load_imbalance_max": {600: 2.0}}, id="load-at-two"),
        pytest.param({"moe_load_imbalance_max": {}}, id="no-load"),
    ],
)
def test_run_that_did_not_learn_fails(changes):
    assert not passes(**changes)


def test_loss_near_the_bigram_entropy_fails_although_below_two():
    assert not all(check.holds for check in judge(GOOD | {"lm loss validation": {600: 1.9}}, bigram=2.05))


def test_exit_code_and_numbers_are_printed(tmp_path, capsys):
    log, text = tmp_path / "train.log", tmp_path / "text.txt"
    log.write_text("no line of a run\n")
    text.write_bytes(b"abab" * 100)
    assert main([str(log), "--text", str(text)]) == 1
    out = capsys.readouterr().out
    assert "entropy 0.693, bigram" in out
    assert "FAILED validation loss (nats per byte): nan <= 2.000" in out
    assert out.endswith("quickstart: FAILED\n")


def test_missing_log_is_named_without_a_traceback(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_bytes(b"abab")
    with pytest.raises(SystemExit) as raised:
        main([str(tmp_path / "none.log"), "--text", str(text)])
    assert raised.value.code == 2
    assert "none.log: there is no such file; run the training first" in capsys.readouterr().err
