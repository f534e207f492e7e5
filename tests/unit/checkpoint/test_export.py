"""An export onto a full disk."""

from __future__ import annotations

import resource

import pytest
import torch

from tests.helpers.arithmetic import save_model
from titan_opd.checkpoint.export import export_model
from titan_opd.errors import StorageError


def test_without_room_nothing_is_left(tmp_path):
    checkpoint, output = save_model(tmp_path / "step-000001", "llama", seed=0), tmp_path / "model"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(StorageError, match=rf"could not be written to {output} .*File too large"):
            export_model(checkpoint, output, torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [checkpoint]
    export_model(checkpoint, output, torch.float32)
    assert (output / "tokenizer.json").exists()
