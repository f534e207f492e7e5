"""Answers of a model as a file of prompts, and runs that learn from them."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.end_to_end.workshop import TOML, Workshop
from tests.helpers.arithmetic import save_model
from tests.unit.data.chat import make_chat_tokenizer
from titan_opd.data.arithmetic import EOS, arithmetic_tokenizer
from titan_opd.observe import read_metrics

SCRIPT = Path(__file__).parents[2] / "scripts" / "write_answers.py"
SAMPLING = ("--rollout.sampling.max_new_tokens", 60, "--data.arithmetic.num_train", 30)
PLAIN = ("--data.task", "files", "--data.template", "plain")
KD = ("--teacher.engine", "none", "--objective.kind", "cross_entropy", "--rollout.engine", "answers")


def run_script(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("model", ["teacher", "student"])
def test_what_is_written_is_trained_token_by_token(workshop, tmp_path, monkeypatch, capsys, model):
    out = tmp_path / "answers.jsonl"
    run_script(monkeypatch, workshop.toml, out, "--model", model, *SAMPLING)
    rows = read_rows(out)
    assert 5 < len(rows) <= 30
    assert f"wrote {len(rows)} answers" in capsys.readouterr().out
    for row in rows:
        first, second = row["prompt"].removesuffix("=").split("+")
        assert int(row["answer"]) == int(first) + int(second)
        assert 0 < len(row["response"]) < 60
        assert EOS not in row["response"]
        assert row["sampler"]["model"] == str(workshop.folder / model)
        assert (row["sampler"]["temperature"], row["sampler"]["max_new_tokens"], row["sampler"]["seed"]) == (1.0, 60, 0)
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({row["response"] for row in rows}) > 5

    run = workshop.train(tmp_path / "run", *PLAIN, "--data.train", out, *KD, "--training.tokens_per_microbatch", 70)
    journal = read_rows(run / "journal.jsonl")
    tokenizer = arithmetic_tokenizer()
    length = {row["id"]: len(tokenizer.encode(row["response"])) + 1 for row in rows}  # <eos> at the end
    for line in journal:
        assert all(sample["tokens"] == length[sample["prompt"]] for sample in line["samples"])


def test_answers_that_end_nowhere_are_left_out_and_counted(workshop, tmp_path, monkeypatch, capsys):
    long, short = tmp_path / "long.jsonl", tmp_path / "short.jsonl"
    run_script(monkeypatch, workshop.toml, long, *SAMPLING)
    capsys.readouterr()
    run_script(monkeypatch, workshop.toml, short, *SAMPLING, "--rollout.sampling.max_new_tokens", 8)
    # The same draws: an answer is there with the same text if it is short enough, and it is left out if it is not.
    assert [(row["id"], row["response"]) for row in read_rows(short)] == [
        (row["id"], row["response"]) for row in read_rows(long) if len(row["response"]) < 8
    ]
    unfinished, empty = map(
        int, re.search(r"left out: (\d+) without a stop .*, (\d+) without a", capsys.readouterr().out).groups()
    )
    assert unfinished + empty == 30 - len(read_rows(short))
    assert unfinished > 5


def test_chat_messages_come_back_as_they_were(tmp_path, monkeypatch):
    tokenizer = make_chat_tokenizer()
    save_model(tmp_path / "teacher", "qwen3", seed=1, tokenizer=tokenizer, vocab_size=107, eos_token_id=3)
    turns = [{"role": "user", "content": "Hi. \N{SNOWMAN}"}, {"role": "assistant", "content": "Yes?"}]
    questions = [f"What is {i} + 2?" for i in range(10)]
    questions += [[*turns, {"role": "user", "content": f"{i}?"}] for i in range(10)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"q": question}) + "\n" for question in questions))
    toml = TOML.format(folder=tmp_path).replace('task = "arithmetic"', "").replace("max_prompt_tokens = 8", "")
    (tmp_path / "run.toml").write_text(toml)
    options = ("--data.train", tmp_path / "prompts.jsonl", "--data.prompt_field", "q", "--run.seed", 3)
    run_script(
        monkeypatch, tmp_path / "run.toml", tmp_path / "out.jsonl", *options, "--rollout.sampling.max_new_tokens", 70
    )
    rows = read_rows(tmp_path / "out.jsonl")
    for row in rows:
        assert row["prompt"] == questions[int(row["id"].removeprefix("prompts.jsonl:")) - 1]
        assert "answer" not in row
    assert {type(row["prompt"]) for row in rows} == {str, list}
    save_model(tmp_path / "student", "llama", seed=0, tokenizer=tokenizer, vocab_size=110, eos_token_id=3)
    run = Workshop(tmp_path).train(
        "run", "--data.train", tmp_path / "out.jsonl", *KD, "--training.tokens_per_microbatch", 300
    )
    assert len(read_metrics(run, "train")) == 3


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["out.txt"], "JSON lines"),
        (["run.toml.jsonl"], "exists already"),
        (["out.jsonl", "--teacher.path", "nowhere"], "nowhere"),
        (["out.jsonl", "--model", "student", "--student.initialize", "random"], "random weights"),
        (["out.jsonl", "--rollout.quantization", "int8"], "add --rollout.quantization none"),
        (["out.jsonl", "--teacher.engine", "vllm"], "add --teacher.engine native"),
        (["out.jsonl", "--model", "student", "--rollout.engine", "vllm"], "add --rollout.engine native"),
        (["out.jsonl", "--rollout.sampling.max_new_tokens", "1"], "none of the 30 answers ended"),
    ],
)
def test_what_a_user_can_get_wrong(workshop, tmp_path, monkeypatch, capsys, arguments, fragment):
    (tmp_path / "run.toml.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        run_script(monkeypatch, workshop.toml, *arguments[:1], *SAMPLING, *arguments[1:])
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert fragment in message
    assert message.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()
