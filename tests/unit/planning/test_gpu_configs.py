"""The configurations for machines with GPUs, which no test can run: they load, can be laid out and fit the devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titan_opd.cli import main
from titan_opd.planning.devices import DEVICES

FOLDER = Path(__file__).parents[3] / "train_configs" / "qwen3"
WORLDS = {"one_node": 2, "colocated": 8, "many_nodes": 16}  # processes of the trainer, by each file's first lines
SHAPES = {
    "Qwen3-1.7B": {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144},
    "Qwen3-8B": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288},
    "Qwen3-32B": {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders with the config.json of the models that the files name."""
    folder = tmp_path_factory.mktemp("shapes") / "models"
    common = {
        "model_type": "qwen3",
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
    }
    for name, shape in SHAPES.items():
        (folder / name).mkdir(parents=True)
        config = common | shape | {"tie_word_embeddings": name == "Qwen3-1.7B"}
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder.parent


def test_every_file_is_here():
    assert {file.stem for file in FOLDER.glob("*.toml")} == set(WORLDS)


@pytest.mark.parametrize("name", WORLDS)
def test_every_process_fits_its_device(name, models, tmp_path, monkeypatch):
    monkeypatch.chdir(models)
    toml, found = FOLDER / f"{name}.toml", tmp_path / "plan.json"
    assert f"--world {WORLDS[name]}" in toml.read_text()
    assert main(["plan", str(toml), "--world", str(WORLDS[name]), "--json", str(found)]) == 0
    plan = json.loads(found.read_text())
    assert plan["num_processes"] == WORLDS[name]
    for process in plan["memory"]:
        assert process["total"] < 0.95 * DEVICES["h100"].memory, process["process"]
