"""Every environment variable that this tree reads, typed; an unreadable value is an error that names the variable.

Nothing is read at import. Variables that only libraries read are listed too where the configuration checks them.
"""

import os

from megatron.core.errors import ConfigError


def _text(name: str, default: str | None = None) -> str | None:
    value = os.environ.get(name)
    return default if value is None or value == "" else value


def _integer(name: str, default: int | None, minimum: int = 0) -> int | None:
    text = _text(name)
    if text is None:
        return default
    if not text.lstrip("-").isdigit() or int(text) < minimum:
        raise ConfigError(f"{name}={text!r}: an integer from {minimum} on is needed; correct or unset the variable")
    return int(text)


def rank() -> int:
    """RANK: this process among all; 0 without a launcher."""
    return _integer("RANK", 0) or 0


def world_size() -> int | None:
    """WORLD_SIZE: number of processes; None without a launcher."""
    return _integer("WORLD_SIZE", None, minimum=1)


def local_rank() -> int:
    """LOCAL_RANK: this process among those of its host; 0 without a launcher."""
    return _integer("LOCAL_RANK", 0) or 0


def local_world_size() -> int | None:
    """LOCAL_WORLD_SIZE: processes on this host; None without a launcher."""
    return _integer("LOCAL_WORLD_SIZE", None, minimum=1)


def master_addr() -> str | None:
    """MASTER_ADDR: host of the rendezvous; None without a launcher."""
    return _text("MASTER_ADDR")


def master_port() -> int | None:
    """MASTER_PORT: port of the rendezvous; None without a launcher."""
    return _integer("MASTER_PORT", None)


def restart_count() -> int:
    """TORCHELASTIC_RESTART_COUNT: how often torchrun has started its workers again."""
    return _integer("TORCHELASTIC_RESTART_COUNT", 0) or 0


def device_max_connections() -> int | None:
    """CUDA_DEVICE_MAX_CONNECTIONS: hardware queues that a device's streams share; None leaves it to the driver."""
    return _integer("CUDA_DEVICE_MAX_CONNECTIONS", None)


def nccl_algo() -> str | None:
    """NCCL_ALGO: collective algorithms; deterministic mode allows some of them."""
    return _text("NCCL_ALGO")


def cublas_workspace_config() -> str | None:
    """CUBLAS_WORKSPACE_CONFIG: fixed workspaces make cuBLAS repeatable."""
    return _text("CUBLAS_WORKSPACE_CONFIG")


def nvte_allow_nondeterministic_algo() -> str | None:
    """NVTE_ALLOW_NONDETERMINISTIC_ALGO: 0 forbids Transformer Engine kernels that do not repeat."""
    return _text("NVTE_ALLOW_NONDETERMINISTIC_ALGO")


def triton_interpret() -> bool:
    """TRITON_INTERPRET: 1 runs Triton kernels in Python on the CPU."""
    return _text("TRITON_INTERPRET") == "1"


def become_rank(rank: int, world_size: int, port: int) -> None:
    """Be what a launcher would have made of this process: rank `rank` of a world on this host."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def allocator_config() -> str | None:
    """PYTORCH_CUDA_ALLOC_CONF, or PYTORCH_ALLOC_CONF: how torch's CUDA allocator cuts memory."""
    return _text("PYTORCH_CUDA_ALLOC_CONF") or _text("PYTORCH_ALLOC_CONF")


def has_no_memory_caching() -> bool:
    """PYTORCH_NO_CUDA_MEMORY_CACHING: set to anything, torch asks the driver for every block of a GPU."""
    return _text("PYTORCH_NO_CUDA_MEMORY_CACHING") is not None


def nccl_blocking_wait() -> bool:
    """TORCH_NCCL_BLOCKING_WAIT: 1 lets the host wait for every collective."""
    return _text("TORCH_NCCL_BLOCKING_WAIT") == "1"


def nccl_graph_register() -> str | None:
    """NCCL_GRAPH_REGISTER: 0 keeps NCCL from registering the buffers of captured collectives."""
    return _text("NCCL_GRAPH_REGISTER")


def git_commit() -> str | None:
    """GIT_COMMIT: commit of the files, told to a machine that got them without their history."""
    return _text("GIT_COMMIT")


def set_default(name: str, value: str) -> None:
    """Set a variable for libraries that are loaded later, unless the user has set it."""
    os.environ.setdefault(name, value)
