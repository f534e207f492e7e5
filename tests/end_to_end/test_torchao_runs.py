"""Whole runs with products in float8, emulated, and moments of 8 bits: only the training is coarse."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers

from tests.end_to_end.workshop import make_workshop, run_cli
from tests.helpers.arithmetic import save_model
from tests.helpers.runs import assert_same_run
from titan_opd.checkpoint import checkpoint_steps
from titan_opd.models import load_decoder

OPTIONS = (
    *("--training.steps", 4, "--checkpoint.every", 2, "--journal.payload", "true", "--weights.verify", "both"),
    *("--training.float8.recipe", "rowwise", "--training.float8.emulate", "true", "--optimizer.name", "adamw_8bit"),
)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    workshop = make_workshop(tmp_path_factory.mktemp("workshop"))
    shutil.rmtree(workshop.folder / "student")  # moments below 4096 elements keep 32 bits
    save_model(workshop.folder / "student", "llama", seed=0, hidden_size=64, intermediate_size=96)
    return workshop


@pytest.fixture(scope="module")
def whole(workshop):
    """A run whose engine's weights and log-probabilities were compared with the trainer's after every step."""
    torch.compiler.set_stance("force_eager")  # compiling the optimizer takes minutes
    yield workshop.train("whole", *OPTIONS)
    torch.compiler.set_stance("default")


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(workshop, whole):
    run = shutil.copytree(whole, workshop.folder / "resumed")
    shutil.rmtree(checkpoint_steps(run)[4])
    workshop.train("resumed", *OPTIONS, "--resume")
    assert_same_run(run, whole)


def test_the_export_is_a_plain_model(workshop, whole):
    folder = workshop.folder / "exported"
    assert run_cli("export", whole, folder, "--dtype", "float32") == 0
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trained = dict(load_decoder(checkpoint_steps(whole)[4]).named_parameters())
    loaded = dict(exported.named_parameters())
    assert loaded.keys() == trained.keys()
    for name, weight in loaded.items():
        assert torch.equal(weight, trained[name]), name


def test_the_start_says_what_is_in_float8(workshop, capsys):
    assert run_cli("train", workshop.toml, *OPTIONS, "--dry-run") == 0
    assert "float8 (rowwise, emulated): self_attn.q_proj, " in capsys.readouterr().out


def test_without_hardware_a_run_says_so_and_ends(workshop, capsys):
    options = ("--training.float8.recipe", "rowwise", "--training.compute_dtype", "bfloat16")
    assert run_cli("train", workshop.toml, "--run.directory", workshop.folder / "refused", *options) == 2
    assert "training.float8.recipe = 'rowwise' needs a GPU" in capsys.readouterr().err
