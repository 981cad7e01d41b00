"""Initial weights that depend on the seed and on the parameter's global name, and on nothing else.

Each parameter has a generator of its own, seeded with crc32("<seed>:<global name>"). The whole tensor is drawn from it
in fp32, cast to the parameter's dtype, and sliced last. So a model starts from the same bits whatever its number of
layers, its layout or its device are; adding a layer leaves the others as they were. One tensor is in memory at a time.

`init_device="device"` draws in the same way with the accelerator's generator: other bits, faster for large models.
"""

import math
import zlib
from typing import Literal

import torch

from megatron.core.module_api.global_names import named_global_parameters
from megatron.core.param_attrs import ParamAttrs, awaits_init, mark_initialized, param_attrs

# torch fills normal numbers in blocks of 16 and treats a shorter last block in another way. Drawing whole blocks makes
# the numbers of a tensor the beginning of those of a longer one: real vocabulary rows do not depend on the padding.
_BLOCK = 16


def initialize_weights(module: torch.nn.Module, seed: int, init_device: Literal["cpu", "device"] = "cpu") -> None:
    """Fill every parameter below `module` that was allocated and not yet initialised."""
    for name, param in named_global_parameters(module):
        if awaits_init(param):
            attrs = param_attrs(param)
            device = param.device if init_device == "device" else torch.device("cpu")
            with torch.no_grad():
                full = draw_full_tensor(
                    attrs, attrs.full_shape or tuple(param.shape), generator_seed(name, seed), device
                )
                param.copy_(local_slice(full, tuple(param.shape), attrs))
            mark_initialized(param)


def generator_seed(name: str, seed: int) -> int:
    """Return the 32-bit seed of the generator of parameter `name`."""
    return zlib.crc32(f"{seed}:{name}".encode())


def draw_full_tensor(attrs: ParamAttrs, shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    """Return the unsharded initial tensor, fp32 [*shape]."""
    init = attrs.init
    if init.kind == "zeros":
        return torch.zeros(shape, device=device)
    if init.kind == "ones":
        return torch.ones(shape, device=device)
    if init.function is not None:
        full = torch.empty(shape)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            init.function(full)
        return full
    generator = torch.Generator(device).manual_seed(seed)
    count = math.prod(shape)
    flat = torch.empty(math.ceil(count / _BLOCK) * _BLOCK, device=device)
    return flat.normal_(0.0, init.std, generator=generator)[:count].view(shape)


def local_slice(full: torch.Tensor, local_shape: tuple[int, ...], attrs: ParamAttrs) -> torch.Tensor:
    """Cut this rank's part out of an unsharded tensor.

    Shapes: [*full] -> [*local_shape]; each of the `num_parts` equal parts along `partition_dim` is cut by itself.
    """
    dim = attrs.partition_dim
    if dim is None:
        return full
    size = local_shape[dim] // attrs.num_parts
    parts = full.chunk(attrs.num_parts, dim)
    return torch.cat([part.narrow(dim, attrs.partition_rank * size, size) for part in parts], dim)
