"""Defaults and rules of the configuration of gradient buffers."""

import pytest

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.errors import ConfigError


def test_gradients_are_reduced_in_fp32_unless_bf16_is_asked_for():
    assert DistributedDataParallelConfig().grad_reduce_in_fp32 is True
    assert DistributedDataParallelConfig(grad_reduce_in_bf16=True).grad_reduce_in_fp32 is False


def test_all_broken_rules_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, grad_reduce_in_bf16=True, bucket_size=0, num_buckets=2)
    text = str(error.value)
    assert "grad_reduce_in_fp32=True with grad_reduce_in_bf16=True: gradients have one accumulation dtype" in text
    assert "bucket_size=0: must be at least 1" in text
    assert "bucket_size=0 with num_buckets=2: the number of buckets determines their size" in text
