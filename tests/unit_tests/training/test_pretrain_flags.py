"""Flags whose effect shows only in a whole run: masks, passed-over iterations, schedules on resume, missing splits."""

import sys

import pytest

import pretrain_gpt
from megatron.training.checkpoint_paths import read_tracker
from megatron.training.initialize import shut_down
from tests.common.token_files import write_tokens
from tools.run_metrics import parse_log, parse_state_hashes

TINY = (
    "--device cpu --transformer-impl local --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 2 "
    "--tokenizer-type NullTokenizer --vocab-size 32 --num-workers 0 --make-vocab-size-divisible-by 1 --log-interval 1 "
    "--eval-iters 1 "
)


@pytest.fixture
def text(tmp_path):
    """Prefix of documents that end with the EOD token."""
    return write_tokens(
        tmp_path / "text", [[(3 * start + place) % 31 for place in range(20)] + [31] for start in range(30)]
    )


@pytest.fixture
def tiny(text):
    return f"{TINY} --data-path {text} --split 8,1,1 --lr 1e-2 --train-iters 2 "


@pytest.fixture
def start(fresh_program, monkeypatch, capfd):
    def run(line):
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *line.split()])
        code = pretrain_gpt.main()
        shut_down()
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


def test_reset_attention_mask_reaches_the_model(start, tiny):
    plain, masked = (parse_log(start(tiny + flag)[1])["lm loss"] for flag in ("", "--reset-attention-mask"))
    assert plain[1] != masked[1]


def test_last_iteration_is_saved_though_it_is_passed_over(start, tiny, tmp_path):
    code, _, _ = start(f"{tiny} --save {tmp_path} --iterations-to-skip 2")
    assert code == 0
    assert read_tracker(tmp_path) == 2


def test_passed_over_iteration_is_saved_at_the_interval(start, tiny, tmp_path):
    start(f"{tiny} --train-iters 3 --save {tmp_path} --save-interval 2 --iterations-to-skip 2")
    assert (tmp_path / "iter_0000002" / "metadata.json").is_file()


@pytest.mark.parametrize(
    ("flag", "rate"),
    [("--override-opt-param-scheduler", "5.000000E-04"), ("--use-checkpoint-opt-param-scheduler", "1.000000E-02")],
)
def test_schedule_on_resume_comes_from_where_the_flag_says(start, tiny, tmp_path, flag, rate):
    start(f"{tiny} --lr-decay-style constant --save {tmp_path}")
    longer = f"{tiny} --train-iters 3 --lr 5e-4 --lr-decay-style constant --load {tmp_path}"
    code, _, err = start(longer)
    assert code == 1
    assert f"pass {'--override-opt-param-scheduler'} for this run's" in err
    code, out, _ = start(f"{longer} {flag}")
    assert code == 0
    assert f"learning rate: {rate} |" in out


def test_damaged_common_state_is_named(start, tiny, tmp_path):
    start(f"{tiny} --save {tmp_path}")
    (tmp_path / "iter_0000002" / "common.json").write_text('{"args": {}}')
    code, _, err = start(f"{tiny} --load {tmp_path}")
    assert code == 1
    assert "common.json: lacks format_version, train_state, scheduler" in err


def test_evaluation_alone_needs_neither_rate_nor_length(start, tiny, tmp_path, text):
    start(f"{tiny} --save {tmp_path}")
    code, out, _ = start(f"{TINY} --data-path {text} --split 8,1,1 --skip-train --load {tmp_path}")
    assert code == 0
    assert parse_log(out)["lm loss validation"].keys() == {2}


def test_missing_training_split_is_named(start, text):
    code, _, err = start(f"{TINY} --data-path {text} --lr 1e-2 --train-iters 2 --split 0,1,0")
    assert code == 1
    assert "split='0,1,0': no data for training; give the train split a share" in err


def test_missing_validation_split_is_announced(start, text):
    flags = f"--data-path {text} --lr 1e-2 --train-iters 2 --split 1,0,0 --eval-interval 1"
    code, out, err = start(f"{TINY} {flags} --log-state-hash")
    assert code == 0
    assert len(parse_state_hashes(out)) == 2
    assert "eval_interval=1: no effect, there is no validation data" in err


def test_loader_of_another_program_is_refused(start, tiny):
    code, _, err = start(tiny + "--dataloader-type external")
    assert code == 2
    assert "dataloader_type='external': this program builds its own datasets" in err


def test_unwritable_tensorboard_folder_is_named(start, tiny, tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    code, _, err = start(f"{tiny} --tensorboard-dir {tmp_path / 'file'}")
    assert code == 2
    assert "the folder cannot be written (File exists); give another one with --tensorboard-dir" in err
