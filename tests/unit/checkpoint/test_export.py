"""An export onto a full disk."""

from __future__ import annotations

import resource

import pytest
import torch

from tests.helpers.arithmetic import save_model
from titan_opd.checkpoint.export import export_model
from titan_opd.errors import StorageError
from titan_opd.parallel import open_world


def export(checkpoint, output):
    with open_world() as world:
        export_model(checkpoint, output, torch.float32, world=world)


def test_without_room_nothing_is_left(tmp_path):
    checkpoint, output = save_model(tmp_path / "step-000001", "llama", seed=0), tmp_path / "model"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(StorageError, match=rf"could not be written to {output} .*File too large"):
            export(checkpoint, output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [checkpoint]
    export(checkpoint, output)
    assert (output / "tokenizer.json").exists()
