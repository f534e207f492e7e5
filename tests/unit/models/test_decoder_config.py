"""Reading and writing config.json, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
import transformers

from tests.helpers.tiny_models import make_tiny_checkpoint, make_tiny_model
from titan_opd.models import DecoderConfig, weight_shapes
from titan_opd.models.rope import Llama3Scaling

LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN2_5_0_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,  # carried along, not used
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("values", "num_parameters"),
    [(LLAMA_3_2_1B, 1_235_814_400), (QWEN2_5_0_5B, 494_032_768), (QWEN3_0_6B, 596_049_920)],
    ids=["Llama-3.2-1B", "Qwen2.5-0.5B", "Qwen3-0.6B"],
)
def test_published_models_have_their_published_number_of_parameters(values, num_parameters):
    shapes = weight_shapes(DecoderConfig.from_dict(values))
    assert sum(math.prod(shape) for shape in shapes.values()) == num_parameters


def test_every_field_is_read():
    assert DecoderConfig.from_dict(LLAMA_3_2_1B) == DecoderConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192),
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    )


@pytest.mark.parametrize("values", [LLAMA_3_2_1B, QWEN2_5_0_5B, QWEN3_0_6B], ids=["llama", "qwen2", "qwen3"])
def test_both_styles_of_transformers_mean_the_same(values):
    version_5 = {key: value for key, value in values.items() if key not in ("rope_theta", "rope_scaling")}
    version_5["rope_parameters"] = {
        "rope_type": "default",
        **(values.get("rope_scaling") or {}),
        "rope_theta": values["rope_theta"],
    }
    assert DecoderConfig.from_dict(version_5) == DecoderConfig.from_dict(values)


@pytest.mark.parametrize("values", [LLAMA_3_2_1B, QWEN2_5_0_5B, QWEN3_0_6B], ids=["llama", "qwen2", "qwen3"])
def test_what_is_written_reads_back_here_and_in_transformers(tmp_path, values):
    config = DecoderConfig.from_dict(values)
    assert DecoderConfig.from_dict(config.to_dict()) == config

    for name, content in (("original", values), ("written", config.to_dict())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    original = transformers.AutoConfig.from_pretrained(tmp_path / "original").to_dict()
    written = transformers.AutoConfig.from_pretrained(tmp_path / "written").to_dict()
    ours_to_choose = {"dtype", "_name_or_path", "sliding_window", "max_window_layers"}
    assert {key for key in original if original[key] != written.get(key)} <= ours_to_choose


def test_llama3_scaling_without_the_original_context_takes_the_context():
    values = LLAMA_3_2_1B | {"rope_scaling": dict(LLAMA_3_2_1B["rope_scaling"])}
    del values["rope_scaling"]["original_max_position_embeddings"]
    assert DecoderConfig.from_dict(values).rope_scaling.original_max_position_embeddings == 131072


def test_optional_keys_take_the_defaults_of_transformers():
    required = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    values = {key: LLAMA_3_2_1B[key] for key in (*required, "max_position_embeddings")}
    config = DecoderConfig.from_dict({"model_type": "llama", **values})
    reference = transformers.LlamaConfig(**values)
    assert config.num_kv_heads == reference.num_key_value_heads == 32
    assert config.head_dim == reference.head_dim == 64
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.rope_theta == reference.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings == reference.tie_word_embeddings
    assert config.initializer_range == reference.initializer_range


def test_generation_config_names_the_end_of_text(tmp_path):
    make_tiny_checkpoint(tmp_path, eos_token_id=2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert DecoderConfig.from_directory(tmp_path).eos_token_ids == (5, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert DecoderConfig.from_directory(tmp_path).eos_token_ids == (2,)


WINDOW = {"use_sliding_window": True, "sliding_window": 64}
REFUSED = [  # the model, the keys that are changed (... takes a key out), what the error says
    ("llama", {"model_type": "mistral"}, "model_type = 'mistral' is not a supported.*llama, qwen2, qwen3"),
    ("llama", {"model_type": ...}, "model_type = None"),
    ("qwen3", {"model_type": "qwen3_moe"}, "model_type = 'qwen3_moe'"),
    ("llama", {"model_type": ["llama"]}, r"model_type = \['llama'\] is not a supported"),
    ("llama", {"architectures": 1}, "architectures = 1 must be a list of texts"),
    ("qwen2", {"architectures": ["Qwen2ForSequenceClassification"]}, "no Qwen2ForCausalLM: only causal"),
    ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config = .*awq.* not supported"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    ("llama", {"attention_bias": True}, "attention_bias = True is not supported"),
    ("qwen3", {"attention_bias": True}, "attention_bias = True is not supported"),
    ("llama", {"mlp_bias": True}, "mlp_bias = True is not supported"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported.*set it to 0"),
    (
        "qwen2",
        {**WINDOW, "max_window_layers": 1, "layer_types": ...},
        "sliding_window = 64 is in use from layer 1 of 2",
    ),
    (
        "qwen2",
        {**WINDOW, "max_window_layers": 0, "layer_types": ...},
        "sliding_window = 64 is in use from layer 0 of 2",
    ),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": ..., "max_window_layers": 1, "layer_types": ...},
        "sliding_window = None is in use from layer 1 of 2",
    ),
    (
        "qwen2",
        {**WINDOW, "max_window_layers": None, "layer_types": ...},
        "sliding_window = 64 is in use from layer 0 of 2",
    ),
    (
        "qwen2",
        {**WINDOW, "max_window_layers": "1", "layer_types": ...},
        "max_window_layers = '1' must be an integer, 0 or more",
    ),
    ("qwen2", {**WINDOW, "use_sliding_window": 1, "layer_types": ...}, "use_sliding_window = 1 must be true or false"),
    ("qwen3", {"layer_types": 2}, "layer_types = 2 must be a list of texts, or null"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = .* must be 'full_attention'"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn' is not supported"),
    ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
    ("llama", {"rope_parameters": {}, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor = 0.5",
    ),
    (  # what a person adds to a file of transformers 5, as guides for version 4 say
        "qwen3",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_scaling = .*yarn.* stands beside rope_parameters, and only one can count: take one of them out",
    ),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported: RoPE turns whole heads"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type is not supported"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1.0}},
        "rope_parameters: the key 'factor'",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        "high_freq_factor = 4 must be above low_freq_factor = 4",
    ),
    ("llama", {"hidden_size": ...}, "the key 'hidden_size' is missing"),
    ("llama", {"vocab_size": None}, "the key 'vocab_size' is missing"),
    ("qwen2", {"num_key_value_heads": ...}, "the key 'num_key_value_heads' is missing"),
    ("qwen3", {"head_dim": ...}, "the key 'head_dim' is missing"),
    ("llama", {"hidden_size": "48"}, "hidden_size = '48' must be a positive integer"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers = 0 must be a positive integer"),
    ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps = '1e-6' must be a positive number"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings = 1 must be true or false"),
    ("llama", {"eos_token_id": ["</s>"]}, r"eos_token_id = \['</s>'\] must be a token id"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads = 3 must divide num_attention_heads = 4"),
    ("llama", {"hidden_size": 50, "head_dim": ...}, "hidden_size = 50 must be divisible by num_attention_heads = 4"),
    ("llama", {"head_dim": 15}, "head_dim = 15 must be even"),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_refused_by_name(family, changes, message):
    values = make_tiny_model(family).config.to_dict() | {"model_type": family} | changes
    values = {key: value for key, value in values.items() if value is not ...}
    with pytest.raises(ValueError, match=f"^models/x/config.json: .*{message}"):
        DecoderConfig.from_dict(values, source="models/x/config.json")


def test_a_sliding_window_that_no_layer_uses_is_accepted():
    values = QWEN2_5_0_5B | {"use_sliding_window": True, "max_window_layers": 24}
    assert DecoderConfig.from_dict(values) == DecoderConfig.from_dict(QWEN2_5_0_5B)


def test_a_missing_folder_says_that_nothing_is_downloaded():
    with pytest.raises(ValueError, match=r"'Qwen/Qwen3-0.6B' does not exist; nothing is downloaded.*model.safetensors"):
        DecoderConfig.from_directory("Qwen/Qwen3-0.6B")


def test_a_missing_or_damaged_config_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config.json is missing; a model folder in Hugging Face format holds"):
        DecoderConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        DecoderConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json must hold a JSON object, it holds a list"):
        DecoderConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        DecoderConfig.from_directory(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ValueError, match=r"config.json cannot be read: Is a directory"):
        DecoderConfig.from_directory(tmp_path)
    with pytest.raises(ValueError, match=r"does not exist; nothing is downloaded"):
        DecoderConfig.from_directory("n" * 300)
