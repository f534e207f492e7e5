"""Weights from Hugging Face format: config.json and safetensors, one file or several with an index.

Reading goes tensor by tensor: it holds the model and one tensor, or the part of a tensor that is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titan_opd.models.config import DecoderConfig, read_json
from titan_opd.models.decoder import Decoder

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # safetensors' names


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
    path: str | Path,
    config: DecoderConfig,
    *,
    names: Sequence[str] | None = None,
    part: Callable[[str], tuple[slice, ...]] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the model, once, on the CPU and in the dtype of the file.

    All names and shapes are checked by the call itself, before the first weight is handed out.

    Args:
        path: the folder.
        config: the model in it.
        names: which weights are read, in this order; None: all, file by file.
        part: which rows and columns of a weight are read, by its name; None: all.

    Raises:
        ValueError: the folder is missing, incomplete or damaged, or does not fit `config`.
    """
    directory = Path(path)
    files = _weight_files(directory)
    shapes = weight_shapes(config)
    _check_names(directory, files, shapes)
    for file, held in _by_file(files).items():
        with _open(file) as handle:
            for name in sorted(held & shapes.keys()):
                _check_tensor(file, handle, name, shapes[name])
    if config.tie_word_embeddings and "lm_head.weight" in files:
        _check_tied(files)
    if names is None:
        names = [name for held in _by_file(files).values() for name in sorted(held & shapes.keys())]
    return _read(files, names, part)


def _read(
    files: dict[str, Path], names: Sequence[str], part: Callable[[str], tuple[slice, ...]] | None
) -> Iterator[tuple[str, Tensor]]:
    for file, read in itertools.groupby(names, key=files.__getitem__):
        with _open(file) as handle:
            for name in read:
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
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(
            f"{index_file}: the key 'weight_map' is missing or no table of file names; the index is damaged"
        )
    files = {name: directory / file for name, file in weight_map.items()}
    for file, names in _by_file(files).items():
        if not file.exists():
            raise ValueError(f"{file} is missing; {index_file.name} says that {some_names(names)} are in it")
        with _open(file) as handle:
            held = set(handle.keys())
        if names - held:
            raise ValueError(f"{file} does not hold {some_names(names - held)}, which {index_file.name} says are in it")
        twice = (held & files.keys()) - names
        if twice:
            raise ValueError(
                f"{file} holds {some_names(twice)}, which {index_file.name} says are in another file: there are two "
                "versions of them. Write the folder anew, with the shards of one model only"
            )
    return files


def _no_weights(directory: Path) -> str:
    if not directory.is_dir():
        return f"model folder {str(directory)!r} does not exist; nothing is downloaded: give the path of a local folder"
    pickled = sorted(file.name for file in directory.glob("*.bin"))
    if pickled:
        return (
            f"{directory} holds weights as {some_names(pickled)} only; pickled files are not read. Convert them once: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder) writes safetensors"
        )
    return f"{directory} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}"


def _check_names(directory: Path, files: dict[str, Path], shapes: dict[str, tuple[int, ...]]) -> None:
    missing = shapes.keys() - files.keys()
    if missing:
        tied = "; if the output projection is tied, set tie_word_embeddings to true in config.json"
        raise ValueError(
            f"{directory} lacks the weights {some_names(missing)}{tied if missing == {'lm_head.weight'} else ''}"
        )
    # Old checkpoints store the rotary frequencies, which follow from config.json; a tied output projection is compared
    # with the embedding below.
    unexpected = {name for name in files.keys() - shapes.keys() if not name.endswith("rotary_emb.inv_freq")}
    unexpected -= {"lm_head.weight"}
    if unexpected:
        raise ValueError(
            f"{directory} holds the weights {some_names(unexpected)}, which config.json's model does not have"
        )


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


def some_names(names: Iterable[str], limit: int = 4) -> str:
    """The first few names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
