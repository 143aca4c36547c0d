"""Reads the `.metadata` of a checkpoint folder, a pickle, as data: it runs nothing and points nowhere else."""

import io
import math
import pickle
from pathlib import PurePath
from typing import Any, Final

import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

METADATA: Final = ".metadata"
"""The file that says which tensor lies where."""

# All that torch.distributed.checkpoint writes into it.
_CLASSES: Final = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
}
# What unpickling cut or invented bytes was seen to raise.
_DAMAGED: Final = (
    pickle.UnpicklingError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    TypeError,
    ValueError,
)


class _DataOnly(pickle.Unpickler):
    """Makes objects of the classes above, and refuses to look up anything else."""

    def find_class(self, module_name: str, global_name: str) -> object:
        if global_name in _CLASSES.get(module_name, ()):
            if module_name == "pathlib":
                return PurePath  # of another system's folder, too
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(
            found := getattr(torch, global_name, None), torch.dtype
        ):
            return found
        raise pickle.UnpicklingError(f"it would load {module_name}.{global_name}")


class FolderReader(FsspecReader):
    """Reads folders on any file system that fsspec knows."""

    def read_metadata(self, *args: object, rank: int | None = None, **options: object) -> Metadata:
        """What the folder holds.

        Raises:
            ValueError: if `.metadata` is damaged, would run code, or contradicts the folder's files.
        """
        path = self._get_metadata_path(rank)
        with self.fs.create_stream(path, "rb") as file:
            found = _unpickled(file.read(), str(path))
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class LocalFolderReader(FolderReader):
    """Reads folders on this machine, whose paths may hold what looks like a URL's option."""

    def __init__(self, path: str) -> None:
        FileSystemReader.__init__(self, path)


def folder_reader(path: str) -> FolderReader:
    """For a local path or any fsspec URL."""
    return FolderReader(path) if "://" in path else LocalFolderReader(path)


def _unpickled(content: bytes, path: str) -> Metadata:
    try:
        found: Any = _DataOnly(io.BytesIO(content)).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
        _check_places(found)
    except _DAMAGED as error:
        raise ValueError(f"{path} is damaged or no file of a checkpoint: {error}") from error
    return found


def _check_places(found: Metadata) -> None:
    """Every tensor lies in a file of the folder, in as many bytes as its shape takes."""
    for name, tensor in found.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            continue
        for chunk in tensor.chunks:
            place = found.storage_data[MetadataIndex(name, chunk.offsets)]
            size = math.prod(chunk.sizes) * tensor.properties.dtype.itemsize
            if size > place.length or any(
                offset < 0 or size < 0 or offset + size > whole
                for offset, size, whole in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
            ):
                raise ValueError(f"the shape of {name} doesn't fit its {place.length} bytes")
        if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) < math.prod(tensor.size):
            raise ValueError(f"parts of {name} are missing")
    for place in found.storage_data.values():
        if PurePath(place.relative_path).name != str(place.relative_path):
            raise ValueError(f"{place.relative_path} lies outside of the folder")
