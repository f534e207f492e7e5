"""Checkpoints: atomic folders, exact resume, export."""

from titan_opd.checkpoint.folder import (
    checkpoint_steps,
    model_folder,
    pick_checkpoint,
    remove_remains,
    write_file,
)
from titan_opd.checkpoint.trainer import load_samples, load_trainer, save_checkpoint

__all__ = [
    "checkpoint_steps",
    "load_samples",
    "load_trainer",
    "model_folder",
    "pick_checkpoint",
    "remove_remains",
    "save_checkpoint",
    "write_file",
]
