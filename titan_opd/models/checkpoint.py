"""Weights in Hugging Face format: config.json and safetensors, whole or in shards with an index.

Both ways go tensor by tensor: reading holds the model and one tensor, writing the model and one shard.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from titan_opd.models.config import DecoderConfig, read_json
from titan_opd.models.decoder import Decoder

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # safetensors' names
DEFAULT_SHARD_BYTES = 4 << 30


def load_decoder(
    path: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """A decoder with the weights of the folder `path`, cast to `dtype`.

    Raises:
        ValueError: the folder is missing, incomplete, damaged or unsupported; the error says which and where.
    """
    config = DecoderConfig.from_directory(path)
    with torch.device("meta"):
        decoder = Decoder(config).to(dtype)
    decoder.to_empty(device=device)
    load_weights(decoder, path)
    return decoder


@torch.no_grad()
def load_weights(decoder: Decoder, path: str | Path) -> None:
    """Copy the weights of the folder `path` into `decoder`, cast to its dtype.

    Names and shapes are checked before anything is written, so an error leaves the decoder as it was.

    Raises:
        ValueError: the folder is missing, incomplete or damaged, or does not fit the decoder.
    """
    parameters = dict(decoder.named_parameters())
    for name, tensor in read_weights(path, decoder.config):
        parameters[name].copy_(tensor)


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every weight of a model."""
    with torch.device("meta"):
        decoder = Decoder(config)
    return {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}


def read_weights(
    path: str | Path, config: DecoderConfig, *, part: Callable[[str], tuple[slice, ...]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the model, once, on the CPU and in the dtype of the file.

    All names and shapes are checked before the first weight is handed out.

    Args:
        path: the folder.
        config: the model in it.
        part: which rows and columns of a weight are read, by its name; None: all.

    Raises:
        ValueError: the folder is missing, incomplete or damaged, or does not fit `config`.
    """
    directory = Path(path)
    files = _weight_files(directory)
    shapes = weight_shapes(config)
    _check_names(directory, files, shapes)
    for file, names in _by_file(files).items():
        with _open(file) as handle:
            for name in sorted(names & shapes.keys()):
                _check_tensor(file, handle, name, shapes[name])
    if config.tie_word_embeddings and "lm_head.weight" in files:
        _check_tied(files)
    for file, names in _by_file(files).items():
        with _open(file) as handle:
            for name in sorted(names & shapes.keys()):
                yield name, handle.get_tensor(name) if part is None else _read_part(handle, name, part(name))


def _read_part(handle: safe_open, name: str, part: tuple[slice, ...]) -> Tensor:
    stored = handle.get_slice(name)
    if any(one.start == one.stop for one in part):  # the file's reader knows no empty slices
        return torch.empty([one.stop - one.start for one in part])
    return stored[part]


def _weight_files(directory: Path) -> dict[str, Path]:
    """The file of each weight in the folder, from the index where the weights are in shards."""
    if (directory / WEIGHTS_FILE).exists():
        with _open(directory / WEIGHTS_FILE) as handle:
            return dict.fromkeys(handle.keys(), directory / WEIGHTS_FILE)
    index_file = directory / INDEX_FILE
    if not index_file.exists():
        raise ValueError(_no_weights(directory))
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index_file}: the key 'weight_map' is missing or no table; the index is damaged")
    files = {name: directory / file for name, file in weight_map.items()}
    for file, names in _by_file(files).items():
        if not file.exists():
            raise ValueError(f"{file} is missing; {index_file.name} says that {_some(names)} are in it")
        with _open(file) as handle:
            absent = names - set(handle.keys())
        if absent:
            raise ValueError(f"{file} does not hold {_some(absent)}, which {index_file.name} says are in it")
    return files


def _no_weights(directory: Path) -> str:
    if not directory.is_dir():
        return f"model folder {str(directory)!r} does not exist; nothing is downloaded: give the path of a local folder"
    pickled = sorted(file.name for file in directory.glob("*.bin"))
    if pickled:
        return (
            f"{directory} holds weights as {_some(pickled)} only; pickled files are not read. Convert them once: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder) writes safetensors"
        )
    return f"{directory} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}"


def _check_names(directory: Path, files: dict[str, Path], shapes: dict[str, tuple[int, ...]]) -> None:
    missing = shapes.keys() - files.keys()
    if missing:
        tied = "; if the output projection is tied, set tie_word_embeddings to true in config.json"
        raise ValueError(
            f"{directory} lacks the weights {_some(missing)}{tied if missing == {'lm_head.weight'} else ''}"
        )
    # Old checkpoints store the rotary frequencies, which follow from config.json; a tied output projection is compared
    # with the embedding below.
    unexpected = {name for name in files.keys() - shapes.keys() if not name.endswith("rotary_emb.inv_freq")}
    unexpected -= {"lm_head.weight"}
    if unexpected:
        raise ValueError(f"{directory} holds the weights {_some(unexpected)}, which config.json's model does not have")


def _check_tensor(file: Path, handle: safe_open, name: str, shape: tuple[int, ...]) -> None:
    stored = handle.get_slice(name)
    if tuple(stored.get_shape()) != shape:
        raise ValueError(f"{file}: {name} has the shape {list(stored.get_shape())}, config.json asks for {list(shape)}")
    if stored.get_dtype() not in FLOAT_DTYPES:
        raise ValueError(
            f"{file}: {name} is stored as {stored.get_dtype()}; quantized weights are not supported, give the model "
            f"as one of {', '.join(FLOAT_DTYPES)}"
        )


def _check_tied(files: dict[str, Path]) -> None:
    pair = []
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        with _open(files[name]) as handle:
            pair.append(handle.get_tensor(name))
    if not torch.equal(*pair):
        raise ValueError(
            f"{files['lm_head.weight']}: lm_head.weight differs from model.embed_tokens.weight although config.json "
            "ties them; set tie_word_embeddings to false to use both"
        )


def save_decoder(
    decoder: Decoder,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write config.json and the weights into the folder `path`; see `save_checkpoint_files`."""
    save_checkpoint_files(
        decoder.named_parameters(), decoder.config, path, dtype=dtype, max_shard_bytes=max_shard_bytes
    )


def save_checkpoint_files(
    named_tensors: Iterable[tuple[str, Tensor]],
    config: DecoderConfig,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write a folder that transformers, vLLM and `load_decoder` read: config.json, safetensors, an index for shards.

    A tensor is copied when it is handed out and may change afterwards. Each file is written under a temporary name and
    renamed when all weights are on disk; after an error none of the weights is left.

    Args:
        named_tensors: every weight of the model once, on any device.
        config: the model.
        path: the folder, made when missing; it must not hold weights yet.
        dtype: what the weights are stored as; None keeps each tensor's own.
        max_shard_bytes: most bytes of weights in a file (a larger single weight has a file of its own).

    Raises:
        ValueError: the folder holds weights, or the tensors are not those of `config`.
    """
    directory = Path(path)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes = {max_shard_bytes} must be positive")
    present = sorted(file.name for file in directory.glob("*.safetensors*"))
    if present:
        raise ValueError(f"{directory} already holds {_some(present)}; give a new folder")
    directory.mkdir(parents=True, exist_ok=True)
    shards = _ShardWriter(directory, max_shard_bytes)
    remaining = weight_shapes(config)
    try:
        for name, tensor in named_tensors:
            shape = remaining.pop(name, None)
            if shape is None:
                raise ValueError(f"{name} was handed out twice, or is no weight of the model of config")
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} has the shape {list(tensor.shape)}, the model of config has {list(shape)}")
            shards.add(name, tensor.detach().to(device="cpu", dtype=dtype, copy=True).contiguous())
        if remaining:
            raise ValueError(f"the weights {_some(remaining)} were not handed out")
        shards.finish()
    except BaseException:
        shards.discard()
        raise
    stored_dtype = str(shards.dtype).removeprefix("torch.")
    _write_json(directory / "config.json", config.to_dict() | {"torch_dtype": stored_dtype})


class _ShardWriter:
    """Collects weights and writes them out, shard by shard, under temporary names until their number is known."""

    def __init__(self, directory: Path, max_shard_bytes: int) -> None:
        self.directory = directory
        self.max_shard_bytes = max_shard_bytes
        self.dtype: torch.dtype | None = None  # of the first weight
        self._tensors: dict[str, Tensor] = {}
        self._bytes = 0
        self._total_bytes = 0
        self._written: list[tuple[Path, list[str]]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        self.dtype = self.dtype or tensor.dtype
        if self._tensors and self._bytes + tensor.nbytes > self.max_shard_bytes:
            self._write_shard()
        self._tensors[name] = tensor
        self._bytes += tensor.nbytes

    def finish(self) -> None:
        """Write what is left, give the files their names, and write the index when there are several."""
        self._write_shard()
        weight_map = {}
        for number, (temporary, names) in enumerate(self._written, start=1):
            count = len(self._written)
            file = WEIGHTS_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            temporary.rename(self.directory / file)
            weight_map |= dict.fromkeys(names, file)
        if len(self._written) > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            _write_json(self.directory / INDEX_FILE, index)

    def discard(self) -> None:
        """Remove the files that have not got their names."""
        for temporary, _ in self._written:
            temporary.unlink(missing_ok=True)

    def _write_shard(self) -> None:
        temporary = self.directory / f"shard-{len(self._written) + 1:05d}.tmp"
        self._written.append((temporary, list(self._tensors)))
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(self._tensors, temporary, metadata={"format": "pt"})
        temporary.chmod(mode)  # safetensors makes its files readable by their owner only, whatever the umask
        self._total_bytes += self._bytes
        self._tensors, self._bytes = {}, 0


def _write_json(path: Path, content: dict) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is truncated or damaged, or cannot be read: {error}") from error


def _by_file(files: dict[str, Path]) -> dict[Path, set[str]]:
    grouped: dict[Path, set[str]] = {}
    for name, file in files.items():
        grouped.setdefault(file, set()).add(name)
    return grouped


def _some(names: Iterable[str], limit: int = 4) -> str:
    """The first few names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
