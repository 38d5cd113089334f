"""One file per record: plain, and in the safetensors format."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.stores import Ring, sync_folder


class FilePerValue:
    """A temporary name, fsync, rename; then the folder's fsync.

    Generous: all files of a group are written before the first is synced, and the folder is synced once a group.
    """

    name = "file"

    def __init__(self, folder: Path, record: int, capacity: int) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._ring = Ring(capacity)

    def path(self, number: int) -> Path:
        return self.folder / f"{number:08d}"

    def write(self, values: Sequence[memoryview]) -> None:
        new, gone = self._ring.take(len(values))
        for number in gone:
            self.path(number).unlink()
        for number, value in zip(new, values, strict=True):
            self.save(self.path(number).with_suffix(".new"), value)
        for number in new:
            temporary = self.path(number).with_suffix(".new")
            descriptor = os.open(temporary, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            temporary.rename(self.path(number))
        sync_folder(self.folder)

    def save(self, path: Path, value: memoryview) -> None:
        with open(path, "wb", buffering=0) as file:
            if file.write(value) != len(value):
                raise OSError(f"short write: {path}")

    def read(self, number: int, out: memoryview) -> None:
        with open(self.path(number), "rb", buffering=0) as file:
            if file.readinto(out) != len(out):
                raise OSError(f"short read: {self.path(number)}")

    def close(self) -> None:
        """Nothing is open."""


class SafetensorsFiles(FilePerValue):
    """The same, each file one safetensors tensor of bytes."""

    name = "safetensors"

    def save(self, path: Path, value: memoryview) -> None:
        import torch
        from safetensors.torch import save_file

        save_file({"kv": torch.frombuffer(value, dtype=torch.uint8)}, path)

    def read(self, number: int, out: memoryview) -> None:
        import torch
        from safetensors.torch import load_file

        torch.frombuffer(out, dtype=torch.uint8).copy_(load_file(self.path(number))["kv"])
