"""Checkpoints: atomic folders, saves in the background, exact resume, export."""

from titan_opd.checkpoint.folder import (
    checkpoint_steps,
    model_folder,
    pick_checkpoint,
    remove_remains,
    resuming_from,
    write_file,
)
from titan_opd.checkpoint.saver import CheckpointSaver
from titan_opd.checkpoint.trainer import load_samples, load_trainer

__all__ = [
    "CheckpointSaver",
    "checkpoint_steps",
    "load_samples",
    "load_trainer",
    "model_folder",
    "pick_checkpoint",
    "remove_remains",
    "resuming_from",
    "write_file",
]
