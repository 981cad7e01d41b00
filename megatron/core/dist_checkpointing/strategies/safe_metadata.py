"""Opens `.metadata`, a pickle, without running what a stranger may have put into it.

The file lists tensors, their boxes and byte ranges. Only the classes such a list is made of may be named in it; any
other name ends the load before an object of it exists. Tensor bytes are read with `weights_only=True` by torch, after
their checksums were compared if that is asked for.
"""

from __future__ import annotations

import os
import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from megatron.core.dist_checkpointing.strategies.integrity import damage_in
from megatron.core.errors import CheckpointError

METADATA_FILE = ".metadata"

_DCP = "torch.distributed.checkpoint"
_ADMITTED = {
    f"{_DCP}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {
        *(
            "Size",
            "device",
            "bool",
            "uint8",
            "int8",
            "int16",
            "int32",
            "int64",
            "float16",
            "bfloat16",
            "float32",
            "float64",
        ),
        *("float8_e4m3fn", "float8_e5m2"),
    },
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ADMITTED.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(
            f"{METADATA_FILE} names {module}.{name}: only classes of a tensor list are admitted, nothing of it ran; "
            "this file was not written by torch.distributed.checkpoint, restore it from its source"
        )


class SafeFileSystemReader(FileSystemReader):
    """The file reader of torch.distributed.checkpoint with a guarded `.metadata`.

    Memory: with `verifies_checksums` a box is held as bytes while it is read.
    """

    def __init__(self, path: str | os.PathLike[str], verifies_checksums: bool = False) -> None:
        super().__init__(path)
        self.verifies_checksums = verifies_checksums

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        """The bytes of one box.

        Raises: CheckpointError if they are compared and not those that were written.
        """
        view = super()._slice_file(file, sinfo)
        if not self.verifies_checksums:
            return view
        archive = view.read()
        if problem := damage_in(archive):
            raise CheckpointError(
                f"{self.path}/{sinfo.relative_path}, byte {sinfo.offset}: {problem}; load an earlier iteration"
            )
        return BytesIO(archive)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open `.metadata`.

        Raises: CheckpointError if it is missing, truncated, or names a class outside the fixed list.
        """
        path = Path(self.path) / METADATA_FILE
        try:
            with path.open("rb") as stream:
                metadata = _MetadataUnpickler(stream).load()
        except FileNotFoundError as err:
            raise CheckpointError(f"{path}: not there, so the save was cut short; load an earlier iteration") from err
        except (EOFError, pickle.UnpicklingError, AttributeError, IndexError, KeyError, ValueError, TypeError) as err:
            raise CheckpointError(
                f"{path}: cannot be read ({err}); the file is damaged, load an earlier iteration"
            ) from err
        if not isinstance(metadata, Metadata):
            raise CheckpointError(
                f"{path}: holds a {type(metadata).__name__}, not a tensor list; load an earlier iteration"
            )
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
