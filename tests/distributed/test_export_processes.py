"""A model that two processes export: each writes files of its own, and the model is the one that a process writes."""

from __future__ import annotations

import resource

import pytest
import torch
import transformers

from tests.helpers.arithmetic import save_model
from tests.helpers.runs import load_weights
from tests.helpers.worlds import run_world
from titan_opd.checkpoint.export import export_model
from titan_opd.errors import StorageError
from titan_opd.models import DecoderConfig, ModelFiles, read_weights
from titan_opd.parallel import open_world

pytestmark = pytest.mark.slow  # processes that import everything
MAX_FILE_BYTES = 10_000  # several rounds of files


def export(checkpoint, folder):
    """In each process: which files it wrote, and how the exports that must fail did."""
    written, write = [], ModelFiles.write

    def noting(files, *arguments):
        written.append(write(files, *arguments))
        return written[-1]

    ModelFiles.write = noting
    with open_world() as world:
        for name in ("small", "large"):
            limit = {"max_file_bytes": MAX_FILE_BYTES} if name == "small" else {}
            export_model(checkpoint, folder / name, torch.bfloat16, world=world, **limit)
        files = [str(path.relative_to(folder)).replace(".partial", "") for path in written]
        with pytest.raises(ValueError, match="nothing is overwritten"):
            export_model(checkpoint, folder / "small", torch.bfloat16, world=world)
        if world.rank == 1:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        with pytest.raises(StorageError) as failure:
            export_model(checkpoint, folder / "full", torch.bfloat16, world=world)
        if world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return {"files": files, "failure": str(failure.value)}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    checkpoint = save_model(folder / "checkpoint", "qwen3", seed=0)
    return folder, run_world(export, checkpoint, folder, size=2, folder=tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("name", ["small", "large"])
def test_each_process_writes_files_of_its_own_and_the_model_is_the_same(exported, tmp_path, name):
    folder, found = exported
    with open_world() as world:
        export_model(folder / "checkpoint", tmp_path / "alone", torch.bfloat16, world=world)
    weights, expected = load_weights(folder / name), load_weights(tmp_path / "alone")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
    own = [[file for file in rank["files"] if file.startswith(f"{name}/")] for rank in found]
    assert sorted(own[0] + own[1]) == sorted(f"{name}/{file.name}" for file in (folder / name).glob("*.safetensors"))
    assert abs(len(own[0]) - len(own[1])) <= 1
    assert len(own[1]) > 1 if name == "small" else len(own[1]) == 1
    files = {file.name for file in (tmp_path / "alone").iterdir() if "model" not in file.name}
    assert {file.name for file in (folder / name).iterdir() if "model" not in file.name} == files


def test_transformers_and_the_own_reader_load_it(exported):
    folder, _ = exported
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "small")
    assert model.dtype == torch.bfloat16
    weights = dict(read_weights(folder / "small", DecoderConfig.from_directory(folder / "small")))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name


def test_a_process_without_room_fails_the_export_in_both(exported):
    folder, found = exported
    for rank in found:
        assert rank["failure"].startswith(f"the model could not be written to {folder / 'full'} (process 1: ")
        assert "File too large" in rank["failure"]
    assert not list(folder.glob("full*"))
