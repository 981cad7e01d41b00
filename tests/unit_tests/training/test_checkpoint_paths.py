"""Whatever write, fsync, rename or removal a kill hits, the tracker names a checkpoint that can be read."""

import re
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import load, load_common, replicated, save
from megatron.core.errors import CheckpointError
from megatron.training import checkpoint_paths as paths
from tests.common.faulty_writer import KILLED, boundaries, run_until


def write(root: Path, iteration: int) -> None:
    paths.withdraw(root, iteration)
    tensors = [replicated("w", torch.full((8,), float(iteration))), replicated("optimizer.m", torch.ones(3))]
    save(paths.checkpoint_folder(root, iteration), tensors, {"iteration": iteration})
    paths.publish(root, iteration)
    paths.prune(root, 10, iteration)


def read(root: Path) -> int | None:
    folder = paths.folder_to_load(root)
    if folder is None:
        return None
    data = torch.zeros(8)
    load(folder, [replicated("w", data)], ignored=re.compile(r"optimizer\..*"))
    iteration = load_common(folder)["iteration"]
    assert torch.equal(data, torch.full((8,), float(iteration)))
    return iteration


@pytest.mark.parametrize(
    ("before", "saved", "allowed"),
    [
        pytest.param((), 5, {None, 5}, id="first", marks=pytest.mark.full),
        pytest.param((5,), 10, {5, 10}, id="second", marks=pytest.mark.full),
        pytest.param((10, 20), 20, {10, 20}, id="again", marks=pytest.mark.full),
        pytest.param((10, 15), 20, {15, 20}, id="prunes"),
        pytest.param((5,), 5, {None, 5}, id="only-again", marks=pytest.mark.full),
    ],
)
def test_kill_at_every_boundary_leaves_a_readable_checkpoint(
    tmp_path: Path, before: tuple[int, ...], saved: int, allowed: set[int | None]
) -> None:
    def prepared(name: str) -> Path:
        root = tmp_path / name
        root.mkdir()
        for iteration in before:
            write(root, iteration)
        return root

    clean = prepared("clean")
    count = boundaries(lambda: write(clean, saved))
    assert count > 20
    assert read(clean) == saved
    outcomes = set()
    for point in range(1, count + 1):
        root = prepared(str(point))
        status, _ = run_until(lambda root=root: write(root, saved), point)
        assert status == KILLED
        outcomes.add(read(root))
        write(root, saved)
        assert read(root) == saved
    assert outcomes == allowed


def test_tracker_with_garbage_is_named(tmp_path: Path) -> None:
    (tmp_path / paths.TRACKER_FILE).write_text("latest")
    with pytest.raises(CheckpointError, match="holds 'latest', not an iteration"):
        paths.folder_to_load(tmp_path)


def test_missing_folder_lists_what_is_there(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (tmp_path / paths.TRACKER_FILE).write_text("30")
    with pytest.raises(CheckpointError, match="complete iterations here: 10"):
        paths.folder_to_load(tmp_path)
    assert paths.folder_to_load(tmp_path, fallback=True) == paths.checkpoint_folder(tmp_path, 10)
    assert paths.folder_to_load(tmp_path, step=10) == paths.checkpoint_folder(tmp_path, 10)


def test_legacy_format_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / paths.TRACKER_FILE).write_text("3")
    (tmp_path / "iter_0000003" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="legacy `torch` format"):
        paths.folder_to_load(tmp_path)


def test_publish_refuses_an_incomplete_folder(tmp_path: Path) -> None:
    (tmp_path / "iter_0000003").mkdir()
    with pytest.raises(CheckpointError, match="not complete"):
        paths.publish(tmp_path, 3)


def test_two_runs_cannot_save_into_one_folder(tmp_path: Path) -> None:
    first = paths.SaveFolder(tmp_path)
    with pytest.raises(CheckpointError, match=r"another run saves here \(host .*, process \d+\)"):
        paths.SaveFolder(tmp_path)
    first.release()
    paths.SaveFolder(tmp_path).release()


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        paths.SaveFolder(tmp_path / "file" / "below")


def test_prune_keeps_multiples_and_the_newest(tmp_path: Path) -> None:
    for iteration in (5, 10, 15):
        save(paths.checkpoint_folder(tmp_path, iteration), [replicated("w", torch.zeros(1))], {})
    assert paths.prune(tmp_path, 10, newest=15) == [5]
    assert paths.complete_iterations(tmp_path) == [10, 15]


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"-3", b"", "\u0663".encode()])
def test_tracker_that_holds_no_number_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / paths.TRACKER_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match="not an iteration; write the number"):
        paths.read_tracker(tmp_path)


def test_tracker_that_cannot_be_read_is_no_fresh_start(tmp_path: Path) -> None:
    (tmp_path / paths.TRACKER_FILE).mkdir()
    with pytest.raises(CheckpointError, match=r"cannot be read \(Is a directory\)"):
        paths.read_tracker(tmp_path)


def test_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be read \(Not a directory\)"):
        paths.folder_to_load(tmp_path / "file")


def test_folder_on_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / paths.LOCK_FILE).symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=re.escape(f"--save {tmp_path}: cannot be written (")):
        paths.SaveFolder(tmp_path)
