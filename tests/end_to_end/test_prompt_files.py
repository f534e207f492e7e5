"""Prompts from JSONL and Parquet files, with a chat template, through the whole loop."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest
from safetensors.torch import load_file

from tests.end_to_end.workshop import TOML, Workshop, run_cli
from tests.helpers.arithmetic import save_model
from tests.unit.data.chat import make_chat_tokenizer
from titan_opd.observe import read_metrics

ROWS = [
    {"prompt": f"What is {i} + {2 * i}?", "answer": str(3 * i), "response": f"It is\n#### {3 * i}"} for i in range(1, 9)
]
GREETING = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}]
TURNS = [{"prompt": [*GREETING, {"role": "user", "content": f"{i}?"}]} for i in range(8)]


def write_rows(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """Models with a chat tokenizer of 105 tokens; prompts as JSONL and as Parquet."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = make_chat_tokenizer()
    save_model(folder / "student", "llama", seed=0, tokenizer=tokenizer, vocab_size=110, eos_token_id=3)
    save_model(folder / "teacher", "qwen3", seed=1, tokenizer=tokenizer, vocab_size=107, eos_token_id=3)
    for suffix in ("jsonl", "parquet"):
        write_rows(folder / f"rows.{suffix}", ROWS)
        write_rows(folder / f"turns.{suffix}", TURNS)
    toml = TOML.format(folder=folder).replace('task = "arithmetic"', "").replace("max_prompt_tokens = 8", "")
    (folder / "run.toml").write_text(toml.replace("tokens_per_microbatch = 60", "tokens_per_microbatch = 300"))
    return Workshop(folder)


def data_options(chat, train, evaluation):
    return ("--data.train", chat.folder / train, "--data.evaluation", chat.folder / evaluation)


@pytest.mark.parametrize(("train", "evaluation"), [("rows.jsonl", "rows.parquet"), ("rows.parquet", "rows.jsonl")])
def test_distillation_on_files(chat, train, evaluation):
    run = chat.train(f"run-{train}", *data_options(chat, train, evaluation), "--data.system_prompt", "Count.")
    assert [line["step"] for line in read_metrics(run, "train")] == [1, 2, 3]
    assert [line["step"] for line in read_metrics(run, "evaluation")] == [0, 3]
    journal = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    for step in journal:  # 8 rows, 8 answers a step: each step is an epoch
        assert sorted(sample["prompt"] for sample in step["samples"]) == [f"{train}:{i}" for i in range(1, 9)]


def test_both_formats_are_the_same_prompts(chat):
    """Two runs that differ in their files' format only; ids differ, tokens do not."""
    weights = []
    for train in ("turns.jsonl", "turns.parquet"):
        run = chat.train(f"run-{train}", "--data.train", chat.folder / train)
        weights.append(load_file(run / "checkpoints/step-000003/model.safetensors"))
        assert read_metrics(run, "evaluation") == []  # no file, no evaluation
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_prompts_that_the_student_answers_need_no_response(chat, engine):
    placed = ("--rollout.engine", engine, "--rollout.placement", "workers")
    assert run_cli("train", chat.toml, "--dry-run", *data_options(chat, "turns.jsonl", "rows.jsonl"), *placed) == 0


def test_expert_responses_are_trained_token_by_token(chat):
    run = chat.train(
        "experts",
        *data_options(chat, "rows.jsonl", "rows.jsonl"),
        *("--teacher.engine", "none", "--objective.kind", "cross_entropy", "--rollout.engine", "answers"),
    )
    trained = sum(len(row["response"]) + 1 for row in ROWS)  # a character is a token, and <|im_end|> ends the turn
    assert [line["tokens"] for line in read_metrics(run, "train")] == [trained] * 3
    losses = [line["loss"] for line in read_metrics(run, "train")]
    assert losses[2] < losses[0]


def test_a_checkpoint_brings_its_tokenizer_and_template_along(chat, capsys):
    run = chat.train("first", *data_options(chat, "rows.jsonl", "rows.jsonl"))
    assert run_cli("export", run, chat.folder / "export") == 0
    exported = ("--student.path", chat.folder / "export", "--data.max_prompt_tokens", 60)
    assert run_cli("eval", chat.toml, *data_options(chat, "rows.jsonl", "rows.parquet"), *exported) == 0
    assert "of 8 answers right" in capsys.readouterr().out
