"""A checkpoint as a Hugging Face model for others to use."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

from titan_opd.checkpoint.folder import atomic_folder
from titan_opd.errors import StorageError
from titan_opd.models import DecoderConfig, read_weights, save_checkpoint_files


def export_model(checkpoint: Path, output: Path, dtype: torch.dtype) -> None:
    """Write the model of `checkpoint`, with its tokenizer, to the new folder `output`, its weights cast to `dtype`.

    Raises:
        ValueError: `output` exists, or the checkpoint is damaged.
        StorageError: `output` cannot be written.
    """
    if output.exists():
        raise ValueError(f"{str(output)!r} exists already; name a new folder, nothing is overwritten")
    config = DecoderConfig.from_directory(checkpoint)
    try:
        with atomic_folder(output) as folder:
            save_checkpoint_files(read_weights(checkpoint, config), config, folder, dtype=dtype)
            for file in sorted(checkpoint.iterdir()):
                if file.is_file() and not file.name.startswith(("config.json", "model")):
                    shutil.copy2(file, folder / file.name)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"the model could not be written to {output} ({error}); nothing is left there") from error
