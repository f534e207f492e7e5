"""`titan-opd plan`: the command, its numbers, and what it refuses."""

from __future__ import annotations

import json

import pytest

from tests.helpers.arithmetic import save_model
from titan_opd.cli import main
from titan_opd.models import DecoderConfig
from titan_opd.models.flops import causal_pairs, forward_flops
from titan_opd.planning.devices import DEVICES, Device, pick_device
from titan_opd.planning.roles import Answers, rollout_work, teacher_work, trainer_work

STUDENT = {"hidden_size": 96, "intermediate_size": 192}


@pytest.fixture(scope="module")
def toml(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, family in (("student", "llama"), ("teacher", "qwen3")):
        save_model(folder / name, family, seed=0, **(STUDENT if name == "student" else {}))
        (folder / name / "model.safetensors").unlink()  # a plan reads shapes only
    file = folder / "run.toml"
    file.write_text(
        f"""
        [student]
        path = "{folder / "student"}"
        [teacher]
        path = "{folder / "teacher"}"
        top_k = 8
        [data]
        task = "arithmetic"
        max_prompt_tokens = 16
        [schedule]
        batch = 128
        [objective]
        kind = "forward_kl"
        [training]
        steps = 1
        tokens_per_microbatch = 400
        [rollout.sampling]
        max_new_tokens = 32
        """
    )
    return file


def plan(toml, tmp_path, *arguments):
    file = tmp_path / "plan.json"
    assert main(["plan", str(toml), "--json", str(file), *arguments]) == 0
    return json.loads(file.read_text())


def test_a_plan_for_64_processes(toml, tmp_path, capsys):
    found = plan(toml, tmp_path, "--world", "64", "--parallel.tp", "2")
    assert found["num_processes"] == 64
    # 4 answers of 47 tokens for each of 32 shares; 8 of them would fit.
    assert found["work"] == {"num_tokens": 188, "num_rows": 128, "num_microbatches": 1, "separate_calls": True}
    assert {one["collective"] for one in found["traffic"]} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert [role["name"] for role in found["roles"]] == ["rollout", "teacher", "trainer"]
    (memory,) = found["memory"]
    assert {"parameters", "optimizer state", "engine's weights", "teacher's weights"} == set(memory["resident"])
    text = capsys.readouterr().out
    assert "64 = dp_replicate 1 x dp_shard 32 x tp 2" in text
    assert "tried on 64 fake processes" in text
    assert "H100 SXM 80 GB (datasheet)" in text


def test_a_shared_teacher_is_divided(toml, tmp_path):
    whole, shared = (
        plan(toml, tmp_path, "--world", "4", "--parallel.tp", "2", "--teacher.sharded", sharded)["memory"][0]
        for sharded in ("false", "true")
    )
    ratio = shared["resident"]["teacher's weights"] / whole["resident"]["teacher's weights"]
    assert 1 / 4 <= ratio < 0.27  # norms are whole on both ranks of tp, rows do not divide


def test_workers_have_memory_of_their_own(toml, tmp_path, capsys):
    workers = ("--rollout.placement", "workers", "--rollout.workers", "3", "--schedule.mode", "async")
    workers += ("--teacher.placement", "workers")
    found = plan(toml, tmp_path, *workers)
    assert [one["process"] for one in found["memory"]] == ["trainer, process 0", "rollout worker", "teacher worker"]
    assert "teacher's weights" not in found["memory"][0]["resident"]
    assert {role["name"]: role["num_devices"] for role in found["roles"]} == {"rollout": 3, "teacher": 1, "trainer": 1}
    text = capsys.readouterr().out
    assert "assumed: one teacher worker" in text
    assert "one rollout worker" not in text


def caches(process):
    """Bytes of the KV cache at each moment that has one."""
    return {m["name"]: m["num_bytes"]["KV cache"] for m in process["moments"] if "KV cache" in m["num_bytes"]}


def test_each_share_of_the_answers_and_of_the_evaluation_has_its_own_cache(toml, tmp_path):
    """A row has 16 tokens of a prompt and 32 of an answer, 64 in evaluations; 64 rows at most."""
    (one,), (four,) = (
        plan(toml, tmp_path, "--world", world, "--evaluation.sampling.max_new_tokens", "64")["memory"]
        for world in ("1", "4")
    )
    row = caches(four)["writing"] // 32
    assert caches(one) == {"writing": 64 * row, "evaluation": 64 * row // 48 * 80}
    assert caches(four) == {"writing": 32 * row, "evaluation": 50 * row // 48 * 80}


def test_vllm_takes_its_share_of_the_device(toml, tmp_path):
    vllm = ("--rollout.engine", "vllm", "--rollout.placement", "workers", "--schedule.mode", "async")
    told = plan(toml, tmp_path, *vllm, "--rollout.vllm.kv_cache_mb", "512")["memory"][1]
    assert caches(told) == {"writing": 512 << 20}
    share = ("--rollout.vllm.kv_cache_mb", "0", "--rollout.vllm.gpu_memory_utilization", "0.5")
    (cache,) = caches(filled := plan(toml, tmp_path, *vllm, *share)["memory"][1]).values()
    assert cache + sum(filled["resident"].values()) == int(0.5 * 80e9)


def test_offloaded_states_are_in_the_hosts_memory(toml, tmp_path):
    device, host = plan(toml, tmp_path, "--world", "2", "--parallel.cpu_offload", "true")["memory"]
    assert host["in_host"]
    assert not device["in_host"]
    assert set(host["resident"]) == {"parameters", "optimizer state"}
    assert not set(host["resident"]) & set(device["resident"])
    # Masters, two moments and gradients, of as many bytes each.
    assert host["total"] == 4 * host["resident"]["parameters"]


def test_more_answers_than_fit_are_several_micro_batches(toml, tmp_path):
    work = plan(toml, tmp_path, "--world", "2")["work"]
    assert (work["num_tokens"], work["num_microbatches"]) == (8 * 47, 8)  # 64 answers, 8 at a time
    shorter = plan(toml, tmp_path, "--world", "2", "--prompt-tokens", "8", "--answer-tokens", "13")["work"]
    assert (shorter["num_tokens"], shorter["num_rows"], shorter["num_microbatches"]) == (20 * 20, 20 * 13, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--world", "0"), "--world 0 must be at least 1"),
        (("--world", "3"), "cannot be shared equally by 3 processes"),
        (("--student.path", "nowhere"), "model folder 'nowhere' does not exist"),
        (("--parallel.tq", "2"), "tq"),
        (("--utilization", "1.5"), "--utilization 1.5 must be above 0 and at most 1"),
        (("--device", "b17"), "--device b17 is not in the table; known: a100, h100, h200"),
        (("--flops", "0"), "--flops 0 must be above 0"),
        (("--answer-tokens", "0"), "--answer-tokens 0 must be at least 1"),
        (("--training.tokens_per_microbatch", "40"), "47 input tokens, more than training.tokens_per_microbatch = 40"),
    ],
)
def test_bad_input_is_refused_with_the_reason(toml, capsys, arguments, message):
    assert main(["plan", str(toml), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_an_error(toml, tmp_path, capsys):
    assert main(["plan", str(toml), "--json", str(tmp_path / "missing" / "plan.json")]) == 1
    assert "could not be written" in capsys.readouterr().err


# ---- Roles -----------------------------------------------------------------------------------------------------------

CONFIG = DecoderConfig.from_dict(
    {
        "model_type": "llama",
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
)
ANSWERS = Answers(count=12, prompt=5, response=7)
DEVICE = Device("unit", flops=1.0, bandwidth=1.0, memory=1.0)


def test_training_is_three_forward_passes_and_four_of_the_layers_when_computed_again():
    teacher = teacher_work(CONFIG, ANSWERS, num_devices=1).flops
    plain, full = (trainer_work(CONFIG, ANSWERS, num_devices=1, recompute=mode).flops for mode in ("none", "full"))
    assert plain == 3 * teacher
    pairs = causal_pairs([ANSWERS.inputs] * ANSWERS.count)
    assert full - plain == forward_flops(CONFIG, num_tokens=ANSWERS.count * 11, num_rows=0, num_pairs=pairs)


def test_decoding_reads_weights_each_step_and_the_keys_and_values_so_far():
    work = rollout_work(CONFIG, ANSWERS, num_devices=2, num_parameters=1000, itemsize=2, concurrent=4)
    # Two engines with 6 answers each, 4 at a time: two rounds of 6 steps after the prompts.
    weights = 2 * 2 * 6 * 1000 * 2
    # The second token of an answer sees 6 tokens, the last one 11; of each 2 layers of 2 heads of 8, keys and values.
    cached = 12 * sum(range(6, 12)) * 2 * (2 * 2 * 8) * 2
    assert work.read_bytes == weights + cached


def test_seconds_are_the_slower_of_products_and_reads_shared_by_the_devices():
    work = rollout_work(CONFIG, ANSWERS, num_devices=2, num_parameters=1000, itemsize=2, concurrent=4)
    by_reads = Device("slow memory", flops=1e30, bandwidth=work.read_bytes, memory=1.0)
    assert work.seconds(by_reads, 0.5) == pytest.approx(1.0)  # half of the rate, two devices
    by_products = Device("slow products", flops=work.flops, bandwidth=1e30, memory=1.0)
    assert work.seconds(by_products, 0.25) == pytest.approx(2.0)
    assert work.device_seconds(by_products, 0.25) == pytest.approx(4.0)


def test_figures_of_ones_own_replace_the_datasheets():
    assert pick_device("h200", flops=None, bandwidth=None) is DEVICES["h200"]
    own = pick_device("h100", flops=500, bandwidth=2000)
    assert (own.flops, own.bandwidth) == (5e14, 2e12)
    assert "figures given" in own.name


@pytest.mark.parametrize(("engine", "stores_8_bits"), [("native", True), ("vllm", False)])
def test_quantised_weights_travel_in_8_bits_and_are_stored_so_by_the_native_engine(
    toml, tmp_path, engine, stores_8_bits
):
    options = ("--world", "1", "--rollout.engine", engine)
    plain, found = (plan(toml, tmp_path, *options, "--rollout.quantization", one) for one in ("none", "int8"))
    layers, hidden, intermediate = 2, STUDENT["hidden_size"], STUDENT["intermediate_size"]
    held = [one["memory"][0]["resident"]["engine's weights"] for one in (plain, found)]
    assert held[0] == plain["weight_bytes"]
    assert held[1] == (found if stores_8_bits else plain)["weight_bytes"]
    # At least the three matrices of each feed-forward layer, 3 bytes a number less and 4 bytes a row more.
    rows = 2 * intermediate + hidden
    assert plain["weight_bytes"] - found["weight_bytes"] >= layers * (3 * 3 * hidden * intermediate - 4 * rows)
