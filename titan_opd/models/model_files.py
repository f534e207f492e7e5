"""Weights out to Hugging Face format: which weight goes into which file, and who writes it.

Several processes write a model in rounds: in a round each writes one file, all at once, and holds no more than that.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from titan_opd.models.checkpoint import INDEX_FILE, WEIGHTS_FILE, some_names, weight_shapes
from titan_opd.models.config import GENERATION_FILE, DecoderConfig
from titan_opd.models.decoder import Decoder

MAX_FILE_BYTES = 4 << 30


class ModelFiles:
    """The files of a model: the same on all processes, because it depends on shapes alone.

    Each file holds neighbouring weights, in the model's order. There are as few files as `max_file_bytes` allows, but
    one for each process where there are weights enough, and they are as equal as can be.

    Args:
        config: the model.
        dtype: what the weights are stored as.
        num_processes: that write it.
        max_file_bytes: most bytes of weights in a file (a larger single weight has a file of its own).

    Attributes:
        names: of the weights in each file.
        dtype: as given.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        *,
        num_processes: int = 1,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        if max_file_bytes < 1:
            raise ValueError(f"max_file_bytes = {max_file_bytes} must be positive")
        self.dtype = dtype
        self.shapes = weight_shapes(config)
        self.num_bytes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in self.shapes.items()}
        self.names = split_names(self.num_bytes, max_file_bytes, num_processes)
        self._config = config
        self._num_processes = num_processes

    def rounds(self) -> Iterator[range]:
        """The files that are written at the same time, one by each process; they cover the weights in order."""
        for first in range(0, len(self.names), self._num_processes):
            yield range(first, min(first + self._num_processes, len(self.names)))

    def files_of(self, rank: int) -> range:
        """The files that a process writes: one in each round."""
        return range(rank, len(self.names), self._num_processes)

    def cast(self, tensor: Tensor) -> Tensor:
        """A copy of a weight as it is stored: on the CPU, its elements in order."""
        return tensor.detach().to(device="cpu", dtype=self.dtype, copy=True).contiguous()

    def write(self, folder: Path, file: int, tensors: Mapping[str, Tensor]) -> Path:
        """Write one file into `folder`, which has it whole or not at all.

        Args:
            folder: of the model.
            file: its number.
            tensors: its weights as `cast` gives them.
        """
        path = folder / self._file_name(file)
        temporary = path.with_name(path.name + ".tmp")
        try:
            temporary.touch()
            mode = temporary.stat().st_mode
            save_file({name: tensors[name] for name in self.names[file]}, temporary, metadata={"format": "pt"})
            temporary.chmod(mode)  # safetensors makes its files readable by their owner only, whatever the umask
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return path

    def write_index(self, folder: Path) -> None:
        """Write the configurations and, where there are several files, the index: last, once, by one process."""
        if len(self.names) > 1:
            weight_map = {name: self._file_name(file) for file, names in enumerate(self.names) for name in names}
            total = sum(self.num_bytes.values())
            _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
        if self._config.generation_config:
            (folder / GENERATION_FILE).write_text(self._config.generation_config, encoding="utf-8")
        stored_dtype = str(self.dtype).removeprefix("torch.")
        _write_json(folder / "config.json", self._config.to_dict() | {"torch_dtype": stored_dtype})

    def _file_name(self, file: int) -> str:
        count = len(self.names)
        return WEIGHTS_FILE if count == 1 else f"model-{file + 1:05d}-of-{count:05d}.safetensors"


def split_names(num_bytes: Mapping[str, int], max_file_bytes: int, num_processes: int) -> list[list[str]]:
    """The names by file: as few rounds of files as possible, and in these the largest file as small as possible."""
    rounds = -(-len(_fill(num_bytes, max_file_bytes)) // num_processes)
    limits = range(1, max_file_bytes + 1)
    best = bisect_left(limits, True, key=lambda limit: len(_fill(num_bytes, limit)) <= rounds * num_processes)
    return _fill(num_bytes, limits[best])


def _fill(num_bytes: Mapping[str, int], limit: int) -> list[list[str]]:
    """The names in order, file after file, each filled up to `limit` bytes."""
    files: list[list[str]] = []
    filled = limit
    for name, size in num_bytes.items():
        if not files or filled + size > limit:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def save_decoder(
    decoder: Decoder,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write config.json and the weights, by default as they are, into the folder `path`: `save_checkpoint_files`."""
    dtype = dtype or next(decoder.parameters()).dtype
    save_checkpoint_files(decoder.named_parameters(), decoder.config, path, dtype=dtype, max_file_bytes=max_file_bytes)


def save_checkpoint_files(
    named_tensors: Iterable[tuple[str, Tensor]],
    config: DecoderConfig,
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a folder that transformers, vLLM and `load_decoder` read, by this process alone.

    A tensor is copied when it is handed out and may change afterwards. A file is written when its last weight is there,
    config.json when all are; after an error none of the weights is left.

    Args:
        named_tensors: every weight of the model once, on any device; in the model's order no more than a file is held.
        config: the model.
        path: the folder, made when missing; it must not hold weights yet.
        dtype: what the weights are stored as.
        max_file_bytes: most bytes of weights in a file (a larger single weight has a file of its own).

    Raises:
        ValueError: the folder holds weights, or the tensors are not those of `config`.
    """
    directory = Path(path)
    files = ModelFiles(config, dtype, max_file_bytes=max_file_bytes)
    present = sorted(file.name for file in directory.glob("*.safetensors*"))
    if present:
        raise ValueError(f"{directory} already holds {some_names(present)}; give a new folder")
    directory.mkdir(parents=True, exist_ok=True)
    file_of = {name: file for file, names in enumerate(files.names) for name in names}
    held: dict[int, dict[str, Tensor]] = {}
    missing = set(files.shapes)
    written: list[Path] = []
    try:
        for name, tensor in named_tensors:
            if name not in missing:
                raise ValueError(f"{name} was handed out twice, or is no weight of the model of config")
            if tuple(tensor.shape) != files.shapes[name]:
                raise ValueError(
                    f"{name} has the shape {list(tensor.shape)}, the model of config has {list(files.shapes[name])}"
                )
            missing.remove(name)
            file = file_of[name]
            tensors = held.setdefault(file, {})
            tensors[name] = files.cast(tensor)
            if len(tensors) == len(files.names[file]):
                written.append(files.write(directory, file, held.pop(file)))
        if missing:
            raise ValueError(f"the weights {some_names(missing)} were not handed out")
        files.write_index(directory)
    except BaseException:
        for file in written:
            file.unlink()
        raise


def _write_json(path: Path, content: dict) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
