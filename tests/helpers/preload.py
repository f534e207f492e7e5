"""Importing this imports all that `titan-opd train` imports sooner or later."""

from torch.utils import tensorboard
from transformers import AutoTokenizer

from titan_opd import cli, train

__all__ = ["AutoTokenizer", "cli", "tensorboard", "train"]
