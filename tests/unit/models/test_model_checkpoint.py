"""Weights in and out of Hugging Face folders, and what damaged folders are told."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.helpers.tiny_models import make_tiny_checkpoint, make_tiny_model
from titan_opd.models import (
    Decoder,
    DecoderConfig,
    load_decoder,
    load_weights,
    save_checkpoint_files,
    save_decoder,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EMBEDDING = "model.embed_tokens.weight"
UP_PROJ = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A sharded checkpoint as transformers writes it, and its model."""
    model = make_tiny_model("qwen3")
    folder = tmp_path_factory.mktemp("source")
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder, model


@pytest.fixture
def folder(source, tmp_path):
    """A copy of the sharded checkpoint, to be damaged."""
    return shutil.copytree(source[0], tmp_path / "model")


def assert_same_weights(decoder: Decoder, model: torch.nn.Module) -> None:
    expected = dict(model.named_parameters())
    actual = dict(decoder.named_parameters())
    assert actual.keys() == expected.keys()
    for name, parameter in actual.items():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("max_file_bytes", [1, 40_000, 1 << 30])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
)
def test_transformers_reads_what_is_written(tmp_path, family, overrides, max_file_bytes):
    make_tiny_checkpoint(tmp_path / "first", family, **overrides)
    decoder = load_decoder(tmp_path / "first")
    save_decoder(decoder, tmp_path / "second", max_file_bytes=max_file_bytes)

    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    exported, notes = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "second", output_loading_info=True)
    assert not any(notes.values())
    assert exported.dtype == torch.float32
    input_ids = torch.arange(1, 100)[None]
    assert torch.equal(exported(input_ids).logits, original(input_ids).logits)
    assert_same_weights(load_decoder(tmp_path / "second"), original)

    shards = list((tmp_path / "second").glob("*.safetensors"))
    assert (len(shards) == 1) == (max_file_bytes == 1 << 30)
    for shard in shards:
        tensors = load_file(shard)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= max_file_bytes
    assert not list((tmp_path / "second").glob("*.tmp"))


def test_weights_are_as_readable_as_any_new_file(source, tmp_path):
    save_decoder(load_decoder(source[0]), tmp_path / "out")
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_shards_written_by_transformers_are_read(source):
    folder, model = source
    assert_same_weights(load_decoder(folder), model)


@pytest.mark.parametrize("settings", [{"do_sample": True, "temperature": 0.6, "eos_token_id": [3, 5]}, None])
def test_generation_settings_go_along_as_they_are(source, tmp_path, settings):
    folder, _ = source
    shutil.copytree(folder, tmp_path / "in")
    file, written = (tmp_path / name / "generation_config.json" for name in ("in", "out"))
    file.unlink(missing_ok=True)
    if settings is not None:
        file.write_text(json.dumps(settings, indent=4))
    decoder = load_decoder(tmp_path / "in")
    save_decoder(decoder, tmp_path / "out")
    if settings is None:
        assert not written.exists()
    else:
        assert decoder.config.eos_token_ids == (3, 5)
        assert written.read_text() == file.read_text()


def test_a_large_index_states_the_bytes(source, tmp_path):
    save_decoder(load_decoder(source[0]), tmp_path / "out", max_file_bytes=40_000)
    ours = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    theirs = json.loads((source[0] / "model.safetensors.index.json").read_text())
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting_when_written_and_when_read(source, tmp_path, dtype):
    folder, model = source
    save_decoder(load_decoder(folder), tmp_path / "half", dtype=dtype)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == dtype
    read_back = load_decoder(tmp_path / "half")
    read_half = load_decoder(folder, dtype=dtype)
    for name, parameter in model.named_parameters():
        assert read_back.get_parameter(name).dtype == torch.float32
        assert torch.equal(read_back.get_parameter(name), parameter.to(dtype).float()), name
        assert torch.equal(read_half.get_parameter(name), parameter.to(dtype)), name


def test_loading_a_tied_model_ignores_an_equal_output_projection_and_old_rotary_buffers(tmp_path):
    model = make_tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights[EMBEDDING].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(weights, tmp_path / "model.safetensors")
    assert_same_weights(load_decoder(tmp_path), model)

    weights["lm_head.weight"][3, 3] += 1
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight.*tie_word_embeddings"):
        load_decoder(tmp_path)


# What is done to a sharded folder, and what the error then says. `shard` holds UP_PROJ.


def remove_shard(folder, shard):
    shard.unlink()
    return rf"{shard.name} is missing; model.safetensors.index.json says that .* are in it"


def truncate_shard(folder, shard):
    shard.write_bytes(shard.read_bytes()[:-10])
    return rf"{shard.name} is truncated or damaged"


def cut_shard_in_its_header(folder, shard):
    shard.write_bytes(shard.read_bytes()[:50])
    return rf"{shard.name} is truncated or damaged"


def empty_shard(folder, shard):
    shard.write_bytes(b"")
    return rf"{shard.name} is truncated or damaged"


def replace_tensor(folder, shard, tensor):
    weights = load_file(shard)
    weights[UP_PROJ] = tensor
    save_file(weights, shard)


def wrong_shape(folder, shard):
    replace_tensor(folder, shard, torch.zeros(7, 48))
    return rf"{shard.name}: {UP_PROJ} has the shape \[7, 48\], config.json asks for \[72, 48\]"


def quantized(folder, shard):
    replace_tensor(folder, shard, torch.zeros(72, 48, dtype=torch.uint8))
    return rf"{shard.name}: {UP_PROJ} is stored as U8; quantized weights are not supported"


def absent_from_its_shard(folder, shard):
    weights = load_file(shard)
    del weights[UP_PROJ]
    save_file(weights, shard)
    return rf"{shard.name} does not hold {UP_PROJ}, which model.safetensors.index.json says are in it"


def change_index(folder, change):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    change(index)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def missing_weight(folder, shard):
    change_index(folder, lambda index: index["weight_map"].pop(UP_PROJ))
    return rf"lacks the weights {UP_PROJ}$"


def missing_output_projection(folder, shard):
    change_index(folder, lambda index: index["weight_map"].pop("lm_head.weight"))
    return r"lacks the weights lm_head.weight; if the output projection is tied, set tie_word_embeddings to true"


def damaged_index(folder, shard):
    change_index(folder, lambda index: index.pop("weight_map"))
    return r"model.safetensors.index.json: the key 'weight_map' is missing"


def no_file_name_in_the_index(folder, shard):
    change_index(folder, lambda index: index["weight_map"].update({UP_PROJ: 3}))
    return r"model.safetensors.index.json: the key 'weight_map' is missing or no table of file names"


def weight_in_two_shards(folder, shard):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    other = folder / next(file for file in index["weight_map"].values() if file != shard.name)
    save_file(load_file(other) | {UP_PROJ: load_file(shard)[UP_PROJ] + 1}, other)
    return rf"{other.name} holds {UP_PROJ}, which model.safetensors.index.json says are in another file"


def unexpected_weight(folder, shard):
    weights = load_file(shard)
    save_file(weights | {"model.layers.0.mlp.router.weight": torch.ones(2)}, shard)
    change_index(folder, lambda index: index["weight_map"].update({"model.layers.0.mlp.router.weight": shard.name}))
    return r"holds the weights model.layers.0.mlp.router.weight, which config.json's model does not have"


def fewer_layers(folder, shard):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "layer_types": None}))
    return r"holds the weights model.layers.1.* and 7 more, which config.json's model does not have"


def no_weights(folder, shard):
    for file in folder.glob("model*"):
        file.unlink()
    return r"holds neither model.safetensors nor model.safetensors.index.json"


def pickled_weights(folder, shard):
    no_weights(folder, shard)
    torch.save({}, folder / "pytorch_model.bin")
    return r"holds weights as pytorch_model.bin only; pickled files are not read. Convert them once: .*save_pretrained"


def no_config(folder, shard):
    (folder / "config.json").unlink()
    return r"config.json is missing; a model folder in Hugging Face format holds config.json and model.safetensors"


def no_folder(folder, shard):
    shutil.rmtree(folder)
    return r"does not exist; nothing is downloaded: .*config.json and model.safetensors"


@pytest.mark.parametrize(
    "damage",
    [
        remove_shard,
        truncate_shard,
        cut_shard_in_its_header,
        empty_shard,
        wrong_shape,
        quantized,
        absent_from_its_shard,
        missing_weight,
        missing_output_projection,
        damaged_index,
        no_file_name_in_the_index,
        weight_in_two_shards,
        unexpected_weight,
        fewer_layers,
        no_weights,
        pickled_weights,
        no_config,
        no_folder,
    ],
)
def test_a_damaged_folder_is_refused_by_name(folder, damage):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    message = damage(folder, folder / index["weight_map"][UP_PROJ])
    with pytest.raises(ValueError, match=message):
        load_decoder(folder)


def test_an_error_leaves_the_decoder_as_it_was(source, folder):
    decoder = load_decoder(source[0])
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for shard in set(index["weight_map"].values()):
        weights = load_file(folder / shard)
        save_file({name: tensor + 1 for name, tensor in weights.items()}, folder / shard)
    wrong_shape(folder, folder / index["weight_map"][UP_PROJ])
    with pytest.raises(ValueError, match="has the shape"):
        load_weights(decoder, folder)
    assert_same_weights(decoder, source[1])


def test_weights_are_copied_when_handed_out_and_written_along_the_way(source, tmp_path):
    _, model = source
    config = DecoderConfig.from_directory(source[0])
    buffer = torch.empty(101 * 48)
    files_seen = []

    def weights_through_one_buffer():
        for name, parameter in model.named_parameters():
            files_seen.append(len(list(tmp_path.glob("*.safetensors"))))
            view = buffer[: parameter.numel()].view(parameter.shape)
            view.copy_(parameter.detach())
            yield name, view

    save_checkpoint_files(weights_through_one_buffer(), config, tmp_path, max_file_bytes=20_000)
    assert_same_weights(load_decoder(tmp_path), model)
    assert files_seen[-1] > files_seen[len(files_seen) // 2] > 0
    assert files_seen == sorted(files_seen)


def test_wrong_weights_are_refused_and_no_file_is_left(source, tmp_path):
    _, model = source
    config = DecoderConfig.from_directory(source[0])
    weights = list(model.named_parameters())
    first_name, first = weights[0]
    for named_tensors, message in (
        (weights[:-1], rf"the weights {weights[-1][0]} were not handed out"),
        ([*weights, weights[0]], rf"{first_name} was handed out twice"),
        ([*weights, ("model.extra.weight", first)], "model.extra.weight was handed out twice, or is no weight"),
        ([*weights[1:], (first_name, first[:5])], rf"{first_name} has the shape \[5, 48\].*has \[101, 48\]"),
    ):
        with pytest.raises(ValueError, match=message):
            save_checkpoint_files(named_tensors, config, tmp_path, max_file_bytes=20_000)
        assert not list(tmp_path.iterdir())


def test_a_folder_with_weights_is_not_written_over(source):
    decoder = load_decoder(source[0])
    with pytest.raises(ValueError, match=r"already holds model-00001-of-.*give a new folder"):
        save_decoder(decoder, source[0])


def test_a_shard_needs_room(source, tmp_path):
    with pytest.raises(ValueError, match="max_file_bytes = 0 must be positive"):
        save_decoder(load_decoder(source[0]), tmp_path, max_file_bytes=0)
