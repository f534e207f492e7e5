"""A checkpoint as a Hugging Face model for others to use."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from titan_opd.checkpoint.folder import atomic_folder, flush
from titan_opd.checkpoint.together import Together
from titan_opd.errors import StorageError
from titan_opd.models import DecoderConfig, ModelFiles, read_weights
from titan_opd.models.model_files import MAX_FILE_BYTES
from titan_opd.parallel import World


def export_model(
    checkpoint: Path, output: Path, dtype: torch.dtype, *, world: World, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write the model of `checkpoint`, with its tokenizer, to the new folder `output`, its weights cast to `dtype`.

    Each process reads the weights of its own files and writes them, one file at a time: no more is ever held. The
    folder has its name when all files are on the disk.

    Args:
        checkpoint: a folder that all processes see.
        output: another.
        world: the processes.
        max_file_bytes: most bytes of weights in a file.

    Raises:
        ValueError: `output` exists, or the checkpoint is damaged.
        StorageError: in all processes, when one could not write to `output`.
    """
    if output.exists():
        raise ValueError(f"{str(output)!r} exists already; name a new folder, nothing is overwritten")
    config = DecoderConfig.from_directory(checkpoint)
    files = ModelFiles(config, dtype, num_processes=world.size, max_file_bytes=max_file_bytes)
    together = Together()
    own = files.files_of(world.rank)
    weights = read_weights(checkpoint, config, names=[name for file in own for name in files.names[file]])

    def write_files(folder: Path) -> None:
        for file in own:
            flush(files.write(folder, file, {name: files.cast(next(weights)[1]) for name in files.names[file]}))

    def write_the_rest(folder: Path) -> None:
        files.write_index(folder)
        for file in sorted(checkpoint.iterdir()):
            if file.is_file() and not file.name.startswith(("config.json", "model")):
                shutil.copy2(file, folder / file.name)

    world.barrier()  # all have looked whether `output` exists
    try:
        with atomic_folder(output, together) as folder:
            together.all(lambda: write_files(folder))
            together.main_alone(lambda: write_the_rest(folder))
    except StorageError as error:
        raise StorageError(f"the model could not be written to {output} ({error}); nothing is left there") from error
