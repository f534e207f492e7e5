"""One run with everything on: what its folder holds, and what `eval` and `export` make of it."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.end_to_end.workshop import run_cli
from titan_opd.config import load_config
from titan_opd.config.schema import OptimizerConfig
from titan_opd.models import PackedAttention, load_decoder
from titan_opd.observe import read_metrics
from titan_opd.optimizer import learning_rate
from titan_opd.weights import direct
from titan_opd.weights.errors import VerificationError

OPTIONS = (
    *("--schedule.minibatches", "2", "--schedule.samples_per_prompt", "2"),
    *("--training.steps", "4", "--evaluation.every", "2", "--checkpoint.every", "1", "--checkpoint.keep", "2"),
    *("--optimizer.decay", "linear", "--optimizer.warmup_steps", "3", "--observe.tensorboard", "true"),
)


@pytest.fixture(scope="module")
def run(workshop):
    return workshop.train("everything", *OPTIONS)


def test_the_configuration_reads_back(workshop, run):
    written = load_config(run / "config.toml")
    assert written == load_config(workshop.toml, ["--run.directory", str(run), *OPTIONS])
    assert written.schedule.minibatches == 2


def test_metrics_have_a_line_a_step_and_one_an_evaluation(run):
    lines = read_metrics(run)
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("evaluation", 0),
        ("train", 1),
        ("train", 2),
        ("evaluation", 2),
        ("train", 3),
        ("train", 4),
        ("evaluation", 4),
    ]
    times = [line["time"] for line in lines]
    assert times == sorted(times)
    train = read_metrics(run, "train")
    assert {"loss", "grad_norm", "tokens", "forward_kl", "seconds/rollout", "tokens_per_second/train"} <= set(train[0])
    config = OptimizerConfig(learning_rate=1e-2, decay="linear", warmup_steps=3)
    last_minibatches = [learning_rate(step, 8, config) for step in (1, 3, 5, 7)]
    assert [line["learning_rate"] for line in train] == pytest.approx(last_minibatches)


def test_tensorboard_shows_the_same_numbers(run):
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    expected = {
        (f"{line['kind']}/{name}", line["step"]): value
        for line in read_metrics(run)
        for name, value in line.items()
        if name not in ("step", "kind", "time")
    }
    shown = {(tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
    assert shown == pytest.approx(expected)


def test_the_newest_checkpoints_are_kept_and_nothing_half_written(run):
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000003", "step-000004"]
    assert not [path for path in run.rglob("*") if path.suffix in (".tmp", ".partial", ".deleted")]


def test_every_sample_is_trained_once_and_prompts_come_in_pairs(run):
    steps = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    assert [(step["step"], step["version"]) for step in steps] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    samples = [sample for step in steps for sample in step["samples"]]
    assert [sample["number"] for sample in samples] == list(range(32))
    for first, second in zip(samples[::2], samples[1::2], strict=True):
        assert first["prompt"] == second["prompt"]
        assert (first["repeat"], second["repeat"]) == (0, 1)
    assert len({sample["prompt"] for sample in samples}) == 16


@pytest.mark.parametrize("path", ["everything", "everything/checkpoints/step-000004"])
def test_eval_reports_what_the_run_reported_last(workshop, run, path, capsys):
    assert run_cli("eval", workshop.toml, "--student.path", workshop.folder / path, *OPTIONS) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"[\d.]+% of 6 answers right, .* finished, KL to the teacher [\d.]+ nats a token", line)
    last = read_metrics(run, "evaluation")[-1]
    assert line.startswith(f"{last['accuracy']:.1%} of 6 answers right, {last['mean_length']:.1f} tokens on average, ")
    assert f"{last['finished_share']:.1%} finished" in line
    assert f"KL to the teacher {last['teacher_kl']:.4f} nats" in line
    first = read_metrics(run, "evaluation")[0]
    assert f"{first['teacher_kl']:.4f}" not in line  # it is the trained student that was evaluated


def hidden_product(decoder, ids):
    """[T, V] logits of our decoder."""
    positions = torch.arange(len(ids))
    hidden = decoder(ids, positions, PackedAttention(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids)))
    return hidden @ decoder.lm_head_weight.T


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("step", [3, None])
def test_export_loads_in_transformers_with_equal_logits(workshop, run, step, dtype):
    output = workshop.folder / f"export-{dtype}-{step}"
    assert run_cli("export", run, output, "--dtype", dtype, *(["--step", step] if step else [])) == 0
    decoder = load_decoder(run / "checkpoints" / f"step-{step or 4:06d}")
    if dtype == "bfloat16":
        decoder = decoder.bfloat16().float()  # the weights rounded once, the arithmetic as before
    model = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    ids = torch.tensor(tokenizer.encode("12+34=2+4=6c0;"))
    assert len(ids) == 14
    torch.testing.assert_close(model(ids[None]).logits[0], hidden_product(decoder, ids), atol=1e-4, rtol=0)
    assert transformers.AutoConfig.from_pretrained(output).dtype == getattr(torch, dtype)
    assert not (output / "trainer").exists()


def snapshot(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_dry_run_checks_and_writes_nothing(workshop, capsys, monkeypatch):
    monkeypatch.chdir(workshop.folder)
    before = snapshot(workshop.folder)
    assert run_cli("train", workshop.toml, "--run.directory", "dry", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert 'directory = "dry"' in printed
    assert "student: llama" in printed
    assert printed.endswith("dry run: the configuration can be trained\n")
    assert snapshot(workshop.folder) == before
    assert not (workshop.folder / "dry").exists()


def test_a_dry_run_looks_for_the_recorded_batches_of_a_replay(workshop, run, capsys):
    dry = ("train", workshop.toml, "--run.directory", "dry", "--dry-run", "--replay")
    assert run_cli(*dry, "nowhere.jsonl") == 2
    assert "--replay nowhere.jsonl is no file" in capsys.readouterr().err
    assert run_cli(*dry, run / "journal.jsonl") == 2
    assert "record the run with journal.payload = true" in capsys.readouterr().err


def test_a_dry_run_in_one_process_says_that_it_tries_no_layout(workshop, capsys, monkeypatch):
    monkeypatch.chdir(workshop.folder)
    assert run_cli("train", workshop.toml, "--run.directory", "dry", "--dry-run", "--parallel.tp", "2") == 0
    assert "[parallel] was not tried in this one process" in capsys.readouterr().out


def test_a_run_folder_in_use_is_refused_and_untouched(workshop, run, capsys):
    before = snapshot(run)
    for options in ((), ("--training.steps", "9")):
        assert run_cli("train", workshop.toml, "--run.directory", run, *options) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"titan-opd train: error: run.directory = '{run}' already holds a run;")
        assert error.count("\n") == 1
    assert snapshot(run) == before


@pytest.mark.parametrize("flags", [(), ("--dry-run",)], ids=["", "dry run"])
def test_where_no_folder_can_be_made_is_refused_before_models_are_read(workshop, capsys, flags):
    for directory, reason in (
        (workshop.toml, f"{workshop.toml} is a file"),
        (workshop.toml / "run", f"{workshop.toml} is a file"),
        (workshop.folder / ("n" * 300), "File name too long"),
    ):
        options = ("--run.directory", directory, "--student.path", "nowhere", *flags)
        assert run_cli("train", workshop.toml, *options) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"titan-opd train: error: run.directory = '{directory}' cannot be a folder")
        assert reason in error
        assert error.count("\n") == 1


def test_a_run_whose_weights_overflow_says_that_it_has_diverged(workshop, capsys):
    """Found by the text that trainer and engine compare, before any answer is written with such weights."""
    run = workshop.folder / "overflow"
    options = ("--run.directory", run, "--optimizer.learning_rate", "1e300", "--checkpoint.every", "1")
    assert run_cli("train", workshop.toml, *options) == 2
    error = capsys.readouterr().err
    assert "log-probabilities that are not finite" in error
    assert "lower optimizer.learning_rate" in error
    assert error.count("\n") == 1
    assert not list((run / "checkpoints").glob("step-*"))


def test_an_update_that_does_not_hold_is_one_line(workshop, capsys, monkeypatch):
    def differ(*_, **__):
        raise VerificationError("version 0 at trainer-0: other log-probabilities")

    monkeypatch.setattr(direct, "check_probe", differ)
    assert run_cli("train", workshop.toml, "--run.directory", workshop.folder / "unverified") == 1
    assert capsys.readouterr().err == "titan-opd train: error: version 0 at trainer-0: other log-probabilities\n"


def test_a_worker_for_a_run_that_takes_none_is_refused(workshop, capsys):
    for role in ("rollout", "teacher"):
        assert run_cli("worker", workshop.toml, "--role", role) == 2
        error = capsys.readouterr().err
        assert error.startswith("titan-opd worker: error: schedule.mode = 'sync' with rollout.placement")
        assert "set one of them to 'workers'" in error
