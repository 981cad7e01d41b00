"""Which samples each rank takes at each micro step.

The order is a function of consumed samples alone, never of the data-parallel size, so that a run may resume with
another one: `consumed` grows by the global batch size, and a micro step takes micro_batch_size * dp_size places in a
row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.core.errors import DataError


class _Sampler:
    """What the samplers share: sizes, and the check that something is left."""

    def __init__(
        self, total_samples: int, consumed_samples: int, micro_batch_size: int, dp_rank: int, dp_size: int
    ) -> None:
        assert 0 <= dp_rank < dp_size, f"data-parallel rank {dp_rank} of {dp_size}"
        if total_samples <= 0:
            raise DataError(f"total_samples={total_samples}: there is no sample to take; give more data.")
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.samples_per_step = micro_batch_size * dp_size

    def __len__(self) -> int:
        return self.total_samples


class MegatronPretrainingSampler(_Sampler):
    """Places in order: of each step's samples rank r takes the r-th micro batch; an incomplete tail is dropped."""

    def __init__(
        self, total_samples: int, consumed_samples: int, micro_batch_size: int, dp_rank: int, dp_size: int
    ) -> None:
        super().__init__(total_samples, consumed_samples, micro_batch_size, dp_rank, dp_size)
        if consumed_samples >= total_samples:
            raise DataError(
                f"consumed_samples={consumed_samples}: the data has {total_samples} samples, none is left; train fewer "
                "iterations or give more data."
            )

    def __iter__(self) -> Iterator[list[int]]:
        last_step = self.total_samples - self.samples_per_step
        for step in range(self.consumed_samples, last_step + 1, self.samples_per_step):
            first = step + self.dp_rank * self.micro_batch_size
            yield list(range(first, first + self.micro_batch_size))


class MegatronPretrainingRandomSampler(_Sampler):
    """A permutation for each epoch; an iteration is the rest of one epoch, the next begins the one after.

    Sharded, each rank permutes a bucket of its own; unsharded, all permute the whole and take turns.
    Raises: DataError if there are fewer samples than a step takes, or if a resume does not fall on a step.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        data_sharding: bool = True,
    ) -> None:
        super().__init__(total_samples, consumed_samples, micro_batch_size, dp_rank, dp_size)
        self.dp_size = dp_size
        self.data_sharding = data_sharding
        self.active_samples = total_samples - total_samples % self.samples_per_step
        if self.active_samples == 0:
            raise DataError(
                f"total_samples={total_samples}: a step takes micro_batch_size={micro_batch_size} times {dp_size} "
                "data-parallel ranks; give more data."
            )

    def _order(self, epoch: int, offset: int) -> list[int]:
        """Return the places of this rank in one epoch, after `offset` samples of all ranks."""
        generator = torch.Generator()
        generator.manual_seed(epoch)
        if self.data_sharding:
            bucket = self.total_samples // self.samples_per_step * self.micro_batch_size
            order = torch.randperm(bucket, generator=generator)[offset // self.dp_size :]
            return (order + self.dp_rank * bucket).tolist()
        whole = self.total_samples // self.micro_batch_size * self.micro_batch_size
        return torch.randperm(whole, generator=generator)[offset + self.dp_rank :: self.dp_size].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        epoch, offset = divmod(self.consumed_samples, self.active_samples)
        if offset % self.samples_per_step:
            raise DataError(
                f"consumed_samples={self.consumed_samples}: {offset} samples into the epoch is no multiple of the "
                f"{self.samples_per_step} that a step takes; resume with the same micro batch and data-parallel size."
            )
        order = self._order(epoch, offset)
        size = self.micro_batch_size
        num_steps = (self.active_samples - offset) // self.samples_per_step  # the same on all ranks
        for step in range(num_steps):
            self.consumed_samples += self.samples_per_step
            yield order[step * size : (step + 1) * size]


class FullValidationSampler(_Sampler):
    """Every place once, one at a time: rank r takes b * dp_size + r.

    All ranks take equally many steps, so that none waits for ever: one that has no place left takes None, for which a
    dataset gives a sample without a token that counts. The length is the number of steps.
    """

    def __len__(self) -> int:
        return (self.total_samples + self._dp_size - 1) // self._dp_size

    @property
    def _dp_size(self) -> int:
        return self.samples_per_step // self.micro_batch_size

    def __iter__(self) -> Iterator[list[int | None]]:
        for step in range(len(self)):
            place = step * self._dp_size + self.dp_rank
            yield [place if place < self.total_samples else None]
