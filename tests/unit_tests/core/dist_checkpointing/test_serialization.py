"""Boxes in, boxes out: any cut of a global tensor reads any other; damaged and foreign folders are refused by name."""

import os
import pickle
import re
import resource
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import (
    PendingSave,
    ShardedTensor,
    Strictness,
    is_complete,
    load,
    load_common,
    replicated,
    save,
    stored_shapes,
)
from megatron.core.errors import CheckpointError

WHOLE = torch.arange(24.0).view(4, 6)


def rows(step: int, fill: torch.Tensor | None = None) -> list[ShardedTensor]:
    source = WHOLE if fill is None else fill
    return [ShardedTensor("w", source[i : i + step], (4, 6), (i, 0)) for i in range(0, 4, step)]


def columns(step: int, fill: torch.Tensor) -> list[ShardedTensor]:
    return [ShardedTensor("w", fill[:, i : i + step], (4, 6), (0, i)) for i in range(0, 6, step)]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_rows_saved_are_columns_loaded(tmp_path: Path, cut: int) -> None:
    save(tmp_path / "c", rows(2), {})
    got = torch.full((4, 6), -1.0)
    load(tmp_path / "c", columns(cut, got))
    assert torch.equal(got, WHOLE)


def test_stacked_layers_are_read_one_by_one(tmp_path: Path) -> None:
    layers = [torch.full((2, 3), float(i)) for i in range(3)]
    save(tmp_path / "c", [ShardedTensor("l", t, (3, 2, 3), (i, 0, 0)) for i, t in enumerate(layers)], {})
    got = torch.zeros(2, 3)
    load(tmp_path / "c", [ShardedTensor("l", got, (3, 2, 3), (2, 0, 0))])
    assert torch.equal(got, layers[2])
    assert stored_shapes(tmp_path / "c") == {"l": (3, 2, 3)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,)])
def test_dtypes_and_odd_shapes_come_back_bitwise(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    data = torch.ones(shape).mul(3).to(dtype)
    save(tmp_path / "c", [replicated("x", data)], {})
    got = torch.zeros(shape, dtype=dtype)
    load(tmp_path / "c", [replicated("x", got)])
    assert torch.equal(got, data)


def test_async_save_keeps_the_values_of_the_call(tmp_path: Path) -> None:
    data = torch.zeros(1000)
    pending = PendingSave(tmp_path / "c", [replicated("x", data)], {"n": 1}, asynchronous=True)
    data.fill_(7)
    assert not is_complete(tmp_path / "c")
    pending.commit()
    got = torch.ones(1000)
    load(tmp_path / "c", [replicated("x", got)])
    assert torch.equal(got, torch.zeros(1000))
    assert load_common(tmp_path / "c") == {"n": 1}


def test_boxes_that_leave_a_hole_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the boxes of w cover 12 of 24 elements"):
        save(tmp_path / "c", rows(2)[:1], {})
    assert not is_complete(tmp_path / "c")


def test_every_difference_is_listed_at_once(tmp_path: Path) -> None:
    save(tmp_path / "c", [replicated("a", torch.zeros(3)), replicated("b", torch.zeros(2))], {})
    with pytest.raises(CheckpointError) as err:
        load(tmp_path / "c", [replicated("a", torch.zeros(4)), replicated("c", torch.zeros(1))])
    text = str(err.value)
    assert "a: stored [3], the model has [4]" in text
    assert "not in the checkpoint (1):\n    c" in text
    assert "in the checkpoint, not in the model (1):\n    b" in text


@pytest.mark.parametrize(
    ("strictness", "missing_raises", "extra_raises"),
    [
        (Strictness.RAISE_ALL, True, True),
        (Strictness.RAISE_UNEXPECTED, True, True),
        (Strictness.ASSUME_OK_UNEXPECTED, True, False),
        (Strictness.LOG_UNEXPECTED, False, False),
        (Strictness.LOG_ALL, False, False),
        (Strictness.IGNORE_ALL, False, False),
    ],
)
def test_strictness_decides_on_keys_of_one_side(
    tmp_path: Path, strictness: Strictness, missing_raises: bool, extra_raises: bool
) -> None:
    save(tmp_path / "c", [replicated("a", torch.zeros(1))], {})

    def raises(tensors: list[ShardedTensor]) -> bool:
        try:
            load(tmp_path / "c", tensors, strictness)
        except CheckpointError:
            return True
        return False

    assert raises([replicated("a", torch.zeros(1)), replicated("b", torch.zeros(1))]) is missing_raises
    assert raises([]) is extra_raises


def test_ignored_keys_may_stay_unread(tmp_path: Path) -> None:
    save(tmp_path / "c", [replicated("w", torch.zeros(1)), replicated("optimizer.m", torch.zeros(1))], {})
    load(tmp_path / "c", [replicated("w", torch.zeros(1))], ignored=re.compile(r"optimizer\..*"))


class _Payload:
    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("/tmp/planted-payload-was-run"),))


def test_planted_payload_is_refused_and_not_run(tmp_path: Path) -> None:
    save(tmp_path / "c", rows(2), {})
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(_Payload()))
    with pytest.raises(CheckpointError, match=r"names .*: only classes of a tensor list are admitted"):
        load(tmp_path / "c", rows(2, torch.zeros(4, 6)))
    assert not Path("/tmp/planted-payload-was-run").exists()


@pytest.mark.parametrize("keep", [0, 1, 40, -3])
def test_truncated_metadata_is_named(tmp_path: Path, keep: int) -> None:
    save(tmp_path / "c", rows(2), {})
    path = tmp_path / "c" / ".metadata"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"\.metadata: cannot be read"):
        load(tmp_path / "c", rows(2, torch.zeros(4, 6)))


def test_file_that_cannot_grow_is_named_with_the_room_that_is_left(tmp_path: Path) -> None:
    """As on a full disk: the system refuses a write in the middle of a tensor."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            save(tmp_path / "c", [replicated("x", torch.zeros(100_000))], {})
        except CheckpointError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    text = os.read(reader, 1000).decode()
    assert "c: not saved, the checkpoints before it are untouched; rank 0: OSError: [Errno 27] File too large" in text
    assert "(free on this disk: " in text
    assert not is_complete(tmp_path / "c")


def test_truncated_tensor_file_is_named(tmp_path: Path) -> None:
    save(tmp_path / "c", rows(2), {})
    path = tmp_path / "c" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="tensor data cannot be read"):
        load(tmp_path / "c", rows(2, torch.zeros(4, 6)))


@pytest.mark.parametrize("fully_parallel", [False, True])
def test_a_flipped_byte_is_refused_if_checksums_are_compared(tmp_path: Path, fully_parallel: bool) -> None:
    save(tmp_path / "c", rows(2), {})
    got = torch.zeros(4, 6)
    load(tmp_path / "c", rows(2, got), fully_parallel=fully_parallel, verifies_checksums=True)
    assert torch.equal(got, WHOLE)
    path = tmp_path / "c" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[content.index(WHOLE[2:].numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    load(tmp_path / "c", rows(2, got), fully_parallel=fully_parallel)
    assert not torch.equal(got, WHOLE)
    with pytest.raises(
        CheckpointError, match=r"__0_0\.distcp, byte \d+: the checksum of .* does not match; load an earlier"
    ):
        load(tmp_path / "c", rows(2, got), fully_parallel=fully_parallel, verifies_checksums=True)


def test_incomplete_folder_and_foreign_common_state_are_named(tmp_path: Path) -> None:
    save(tmp_path / "c", rows(2), {})
    (tmp_path / "c" / "common.json").unlink()
    (tmp_path / "c" / "common.pt").touch()
    with pytest.raises(CheckpointError, match=r"common\.pt.*--finetune"):
        load_common(tmp_path / "c")
    (tmp_path / "c" / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match="the save was cut short"):
        load_common(tmp_path / "c")


def test_write_error_is_raised_at_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path / "c", rows(2), {})


def test_box_outside_its_tensor_is_refused() -> None:
    with pytest.raises(CheckpointError, match="does not fit into"):
        ShardedTensor("w", torch.zeros(2, 3), (4, 3), (3, 0))
