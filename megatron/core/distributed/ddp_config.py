"""Settings of the gradient buffers and of their reduction over data parallel ranks."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.configs.base import ConfigTopic, Violation, violation
from megatron.core.configs.flag_spec import NO_FLAG, knob


@dataclass
class DistributedDataParallelConfig(ConfigTopic):
    """How gradients are stored, scaled and reduced."""

    grad_reduce_in_fp32: bool | None = knob(
        None, flag="--accumulate-allreduce-grads-in-fp32", dest="accumulate_allreduce_grads_in_fp32"
    )
    """Accumulate and reduce gradients in fp32 (fp64 for fp64 parameters). Unset: yes, unless --grad-reduce-in-bf16."""

    grad_reduce_in_bf16: bool = False
    """Accumulate and reduce gradients in the dtype of the parameters, which halves the buffers and rounds each sum."""

    main_grads_dtype: Literal["fp32", "bf16"] = knob("fp32", flag=NO_FLAG)
    """What the precision-aware optimizer takes; bf16 has the effect of grad_reduce_in_bf16 on a bf16 model."""

    overlap_grad_reduce: bool = False
    """Start the reduction of a bucket in backward, as soon as its gradients are complete."""

    use_distributed_optimizer: bool = False
    """Shard the optimizer over the replicas of a parameter (ZeRO-1): each rank reduces, updates and stores the main
    weights and moments of its shard, then all gather the new parameters."""

    overlap_param_gather: bool = False
    """Gather the parameters of a bucket when the next forward pass comes to it, beside the layers before it."""

    fp8_param_gather: bool = False
    """Gather the weights of FP8 layers as the codes that these compute with, half the bytes of bf16. Everything else
    travels as it is, and so do weights where they are read outside a forward pass."""

    bucket_size: int | None = knob(None, flag="--ddp-bucket-size", dest="ddp_bucket_size")
    """Elements after which a bucket is closed. Unset: max(40M, 1M * DP * CP) with --overlap-grad-reduce, else one."""

    num_buckets: int | None = knob(None, flag="--ddp-num-buckets", dest="ddp_num_buckets")
    """Aim at this many buckets: the bucket size becomes the number of trainable elements divided by it."""

    average_in_collective: bool = knob(False, flag="--ddp-average-in-collective", dest="ddp_average_in_collective")
    """Let the collective average instead of scaling the gradients before it."""

    pad_buckets_for_high_nccl_busbw: bool = knob(
        False, flag="--ddp-pad-buckets-for-high-nccl-busbw", dest="ddp_pad_buckets_for_high_nccl_busbw"
    )
    """Pad each bucket to a multiple of 2^16 elements, sizes at which NCCL reaches its full bandwidth."""

    check_for_nan_in_grad: bool = knob(
        False,
        flag="--no-check-for-nan-in-loss-and-grad",
        dest="check_for_nan_in_loss_and_grad",
        arg_default=True,
    )
    """Stop with the names of the parameters when a gradient is NaN or infinite, before it is reduced. Not with fp16,
    where an overflow skips the step and lowers the loss scale."""

    def derive(self) -> None:
        """Choose the accumulation dtype if it was left open."""
        is_wide = not self.grad_reduce_in_bf16 and self.main_grads_dtype == "fp32"
        self.fill("grad_reduce_in_fp32", is_wide, "grad_reduce_in_bf16 and main_grads_dtype")

    def check(self) -> list[Violation]:
        """Rules among these fields."""
        found = []
        if self.grad_reduce_in_fp32 and self.grad_reduce_in_bf16:
            found.append(
                violation(
                    self,
                    "grad_reduce_in_fp32 grad_reduce_in_bf16",
                    "gradients have one accumulation dtype",
                    "drop --accumulate-allreduce-grads-in-fp32 or --grad-reduce-in-bf16.",
                )
            )
        if self.grad_reduce_in_fp32 and self.main_grads_dtype == "bf16":
            names, why = "grad_reduce_in_fp32 main_grads_dtype", "gradients have one accumulation dtype"
            remedy = "drop --accumulate-allreduce-grads-in-fp32 or --main-grads-dtype bf16."
            found.append(violation(self, names, why, remedy))
        for name, flag in (
            ("use_distributed_optimizer", "--use-distributed-optimizer"),
            ("overlap_grad_reduce", "--overlap-grad-reduce"),
        ):
            if self.overlap_param_gather and not getattr(self, name):
                names = f"overlap_param_gather {name}"
                why = "the gather follows the buckets of the sharded, overlapped reduction"
                found.append(violation(self, names, why, f"add {flag} or drop --overlap-param-gather."))
        if self.fp8_param_gather and not self.use_distributed_optimizer:
            names, why = "fp8_param_gather use_distributed_optimizer", "only sharded parameters are gathered"
            remedy = "add --use-distributed-optimizer or drop --fp8-param-gather."
            found.append(violation(self, names, why, remedy))
        for name, flag in (("bucket_size", "--ddp-bucket-size"), ("num_buckets", "--ddp-num-buckets")):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(violation(self, name, "must be at least 1", f"give a positive number to {flag}."))
        if self.bucket_size is not None and self.num_buckets is not None:
            found.append(
                violation(
                    self,
                    "bucket_size num_buckets",
                    "the number of buckets determines their size",
                    "drop --ddp-bucket-size or --ddp-num-buckets.",
                )
            )
        return found
