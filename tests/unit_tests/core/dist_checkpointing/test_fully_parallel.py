"""Each stored byte is read once over all ranks, and every rank ends with what it would have read by itself."""

import contextlib
import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import PendingSave, ShardedTensor, load, replicated, save
from megatron.core.dist_checkpointing.strategies import fully_parallel
from megatron.core.dist_checkpointing.strategies.safe_metadata import SafeFileSystemReader
from megatron.core.errors import CheckpointError

NUM_LAYERS, NUM_EXPERTS, ROWS, WIDTH = 3, 4, 96, 256


def whole(number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor [ROWS, WIDTH] with values of its own."""
    return (torch.arange(ROWS * WIDTH) % 251 + number).view(ROWS, WIDTH).to(dtype)


def rows_of_rank(key: str, values: torch.Tensor, rank: int, size: int) -> ShardedTensor:
    count = ROWS // size
    part = values[rank * count : (rank + 1) * count].clone()
    return ShardedTensor(key, part, (ROWS, WIDTH), (rank * count, 0))


def state_of_rank(rank: int, size: int, tp: int) -> list[ShardedTensor]:
    """Replicated, cut, stacked and scalar tensors: cut over `tp` ranks, experts over all, the rest on every rank."""
    boxes = [replicated("norm", whole(1, torch.bfloat16)), replicated("step", torch.tensor(7.0))]
    boxes += [rows_of_rank("linear", whole(2), rank % tp, tp), replicated("flags", whole(3) > 100)]
    for layer in range(NUM_LAYERS):
        for expert in range(rank * NUM_EXPERTS // size, (rank + 1) * NUM_EXPERTS // size):
            place = (layer, expert, 0, 0)
            data = whole(10 * layer + expert, torch.float64)
            boxes.append(ShardedTensor("experts", data, (NUM_LAYERS, NUM_EXPERTS, ROWS, WIDTH), place))
    return boxes


def model_bytes() -> int:
    return ROWS * WIDTH * (2 + 4 + 1 + 8 * NUM_LAYERS * NUM_EXPERTS) + 4


def save_state(folder: Path, tp: int) -> None:
    save(folder, state_of_rank(dist.get_rank(), dist.get_world_size(), tp), {})


class CountingStream(io.RawIOBase):
    """A file that counts the bytes read from it."""

    def __init__(self, stream: io.IOBase) -> None:
        self.stream, self.count = stream, 0

    def readinto(self, buffer: memoryview) -> int:
        data = self.stream.read(len(buffer))
        buffer[: len(data)] = data
        self.count += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.stream.seek(offset, whence)

    def tell(self) -> int:
        return self.stream.tell()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True


@contextlib.contextmanager
def counting_reads(counts: list[int]):
    """Append the bytes of each file of tensors that is read."""
    original = SafeFileSystemReader.__init__

    def patched(self, *args):
        original(self, *args)
        open_stream = self.fs.create_stream

        @contextlib.contextmanager
        def create_stream(name, mode):
            with open_stream(name, mode) as stream:
                counting = CountingStream(stream)
                yield counting
                counts.append(counting.count)

        self.fs.create_stream = create_stream

    SafeFileSystemReader.__init__ = patched
    try:
        yield
    finally:
        SafeFileSystemReader.__init__ = original


def load_state(folder: Path, tp: int, is_parallel: bool, round_bytes: int) -> tuple[int, list[str]]:
    """(bytes that this rank read, keys whose values are wrong)."""
    fully_parallel.ROUND_BYTES = round_bytes
    expected = state_of_rank(dist.get_rank(), dist.get_world_size(), tp)
    got = state_of_rank(dist.get_rank(), dist.get_world_size(), tp)
    for box in got:
        box.data.zero_()
    counts: list[int] = []
    with counting_reads(counts):
        load(folder, got, fully_parallel=is_parallel)
    wrong = [a.key for a, b in zip(expected, got, strict=True) if not torch.equal(a.data, b.data)]
    return sum(counts), wrong


@pytest.mark.parametrize(
    ("saved_by", "tp_saved", "loaded_by", "tp", "round_bytes"),
    [(2, 2, 4, 1, 2**26), (4, 4, 2, 2, 2**26), (4, 1, 4, 2, 100_000), (1, 1, 4, 4, 1)],
)
def test_every_byte_is_read_once_over_all_ranks(pool, tmp_path, saved_by, tp_saved, loaded_by, tp, round_bytes):
    pool.run(save_state, tmp_path / "c", tp_saved, world_size=saved_by)
    ranks = pool.run(load_state, tmp_path / "c", tp, True, round_bytes, world_size=loaded_by)
    assert [wrong for _, wrong in ranks] == [[]] * loaded_by
    assert model_bytes() <= sum(count for count, _ in ranks) <= 1.05 * model_bytes()
    assert max(count for count, _ in ranks) <= 1.5 * model_bytes() / loaded_by


def test_without_it_replicas_are_read_by_every_rank(pool, tmp_path):
    """The counting reader counts: what all four ranks hold is read four times."""
    pool.run(save_state, tmp_path / "c", 1, world_size=1)
    ranks = pool.run(load_state, tmp_path / "c", 1, False, 2**26, world_size=4)
    assert [wrong for _, wrong in ranks] == [[]] * 4
    assert sum(count for count, _ in ranks) > 1.05 * model_bytes() + 3 * ROWS * WIDTH * 7


def save_replicas(folder: Path, is_parallel: bool) -> None:
    boxes = [replicated(f"w{number}", torch.ones(2000)) for number in range(6)]
    PendingSave(folder, boxes, {}, fully_parallel=is_parallel).commit()


@pytest.mark.parametrize(("is_parallel", "num_files"), [(True, 2), (False, 1)])
def test_replicas_are_written_by_all_ranks_or_by_the_lowest(pool, tmp_path, is_parallel, num_files):
    pool.run(save_replicas, tmp_path / "c", is_parallel)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "c").glob("*.distcp")}
    assert len([size for size in sizes.values() if size > 3 * 8000]) == num_files, sizes
    assert sizes["__0_0.distcp"] > 3 * 8000
    got = [replicated(f"w{number}", torch.zeros(2000)) for number in range(6)]
    load(tmp_path / "c", got)
    assert all(bool((box.data == 1).all()) for box in got)


def load_replicas(folder: Path) -> int:
    """Bytes that this rank read of tensors that both ranks want whole."""
    counts: list[int] = []
    with counting_reads(counts):
        load(folder, [replicated(f"w{number}", torch.zeros(2000)) for number in range(6)], fully_parallel=True)
    return sum(counts)


def test_replicas_are_read_in_equal_shares(pool, tmp_path):
    pool.run(save_replicas, tmp_path / "c", True)
    shares = pool.run(load_replicas, tmp_path / "c")
    assert min(shares) == pytest.approx(max(shares), rel=0.01)
    assert min(shares) > 3 * 8000


def save_one_each(folder: Path) -> None:
    save(folder, [replicated(f"w{dist.get_rank()}", torch.ones(500))], {})


def load_one_each(folder: Path, is_parallel: bool) -> str:
    """What a rank says; it reads what it has written."""
    try:
        load(folder, [replicated(f"w{dist.get_rank()}", torch.zeros(500))], fully_parallel=is_parallel)
    except CheckpointError as err:
        return str(err)
    return "loaded"


@pytest.mark.parametrize("is_parallel", [True, False])
def test_what_one_rank_cannot_read_ends_the_load_on_all(pool, tmp_path, is_parallel):
    pool.run(save_one_each, tmp_path / "c")
    path = tmp_path / "c" / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:100])
    texts = pool.run(load_one_each, tmp_path / "c", is_parallel)
    assert texts[0] == texts[1]
    assert texts[0].startswith("rank 1: ")
    assert "tensor data cannot be read" in texts[0]


def load_other_keys(folder: Path) -> str:
    """Each rank asks for what it has and for one key that the files lack."""
    rank = dist.get_rank()
    try:
        load(folder, [replicated("a", torch.zeros(2)), replicated(f"stage{rank}", torch.zeros(1))])
    except CheckpointError as err:
        return str(err)
    return "loaded"


def test_missing_keys_of_all_ranks_are_listed_on_all_ranks(pool, tmp_path):
    save(tmp_path / "c", [replicated("a", torch.zeros(2)), replicated("b", torch.zeros(2))], {})
    texts = pool.run(load_other_keys, tmp_path / "c")
    assert texts[0] == texts[1]
    assert "not in the checkpoint (2):\n    stage0\n    stage1" in texts[0]
    assert "in the checkpoint, not in the model (1):\n    b" in texts[0]
    assert "--dist-ckpt-strictness log_all" in texts[0]
