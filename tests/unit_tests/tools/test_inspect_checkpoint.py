"""What is inside a checkpoint as text; folders that hold none, cut-short saves and flipped bytes are named."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor, replicated, save
from tools.checkpoint import inspect

ARGS = {"num_layers": 2, "hidden_size": 4, "pipeline_model_parallel_size": 2, "bf16": True, "lr": 0.5, "fp16": False}
COMMON = {
    "train_state": {"iteration": 4, "consumed_train_samples": 16},
    "args": ARGS,
    "world_size": 2,
    "device": "cpu",
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with one iteration: a stacked weight in two boxes, a moment of it, a generator."""
    key = "decoder.layers.mlp.weight"
    boxes = [ShardedTensor(key, torch.rand(8, 4).bfloat16(), (2, 8, 4), (layer, 0, 0)) for layer in range(2)]
    boxes += [replicated(f"optimizer.state.exp_avg.{key}", torch.rand(2, 8, 4))]
    boxes += [replicated("rng_state.0.torch", torch.arange(100, dtype=torch.uint8))]
    save(tmp_path / "iter_0000004", boxes, COMMON)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4\n")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = inspect.main([str(word) for word in words])
    output = capsys.readouterr()
    return status, output.out, output.err


def test_contents_are_printed(capsys, saved):
    status, text, _ = run(capsys, saved)
    assert status == 0
    assert text.splitlines() == [
        f"folder       {saved}/iter_0000004",
        "iteration    4, 16 samples consumed",
        "saved by     2 ranks on cpu",
        "layout       pipeline_model_parallel_size=2",
        "model        num_layers=2 hidden_size=4 bf16=True",
        "model        1 keys, 128 B",
        "optimizer    1 keys, 256 B",
        "generators   1 keys, 100 B",
        "",
        "dtype            bytes  boxes  key [shape]",
        "bfloat16           128      2  decoder.layers.mlp.weight [2, 8, 4]",
        "float32            256      1  optimizer.state.exp_avg.decoder.layers.mlp.weight [2, 8, 4]",
        "uint8              100      1  rng_state.0.torch [100]",
    ]


def test_keys_arguments_and_checksums_are_shown_when_asked_for(capsys, saved):
    _, text, _ = run(capsys, saved / "iter_0000004", "--keys", "rng", "--args", "--verify")
    assert "  lr = 0.5" in text
    assert "decoder.layers" not in text
    assert text.endswith("rng_state.0.torch [100]\nchecksums    all match\n")


def test_it_runs_as_a_command_beside_the_module_of_its_name(saved):
    """The folder of this script must not hide the standard library's `inspect`."""
    command = [sys.executable, inspect.__file__, str(saved), "--step", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("folder ")


@pytest.mark.parametrize("position", [0.25, 0.5])
def test_a_flipped_byte_is_found_with_its_key(capsys, saved, position):
    path = saved / "iter_0000004" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    wanted = torch.arange(100, dtype=torch.uint8).numpy().tobytes()
    content[content.index(wanted) + int(100 * position)] ^= 1
    path.write_bytes(content)
    status, _, error = run(capsys, saved, "--verify")
    assert status == 1
    assert re.search(r"1 damaged; load an earlier iteration:\n  __0_0\.distcp, byte \d+: rng_state\.0\.torch at", error)
    assert "the checksum of" in error


def test_missing_and_truncated_files_are_found(capsys, saved):
    path = saved / "iter_0000004" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:500])
    assert "4 damaged" in run(capsys, saved, "--verify")[2]
    path.unlink()
    assert "No such file" in run(capsys, saved, "--verify")[2]


def test_wrong_folders_are_named_with_what_to_do(capsys, saved, tmp_path):
    status, _, error = run(capsys, tmp_path / "nowhere")
    assert status == 1
    assert "nowhere: no checkpoint here" in error
    assert "name a folder that a run saved to" in error
    (tmp_path / "empty").mkdir()
    assert "empty: no checkpoint here" in run(capsys, tmp_path / "empty")[2]
    assert "complete iterations here: 4" in run(capsys, saved, "--step", "7")[2]


def test_cut_short_and_foreign_checkpoints_are_told_apart(capsys, saved):
    folder = saved / "iter_0000004"
    foreign = saved / "foreign"
    shutil.copytree(folder, foreign)
    (foreign / "common.json").unlink()
    status, text, _ = run(capsys, foreign)
    assert status == 0
    assert "another program" in text
    assert "decoder.layers.mlp.weight" in text
    (folder / "metadata.json").unlink()
    assert "the save was cut short" in run(capsys, folder)[2]
