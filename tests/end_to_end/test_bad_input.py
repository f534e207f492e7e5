"""What a user can get wrong: one line on stderr with the value and the way out, status 2, nothing written or lost."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file

from tests.end_to_end.workshop import make_workshop, run_cli
from tests.helpers.arithmetic import save_model
from tests.unit.data.chat import make_chat_tokenizer


def refused(capsys, command, *arguments):
    """The one line that a refusal says."""
    status = run_cli(command, *arguments)
    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith(f"titan-opd {command}: error: ")
    assert error.count("\n") == 1, error
    assert error.endswith("\n")
    return error


def snapshot(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


HYBRID = ("--objective.kind", "hybrid", "--objective.support")
POLICY_GRADIENT = ("--objective.kind", "policy_gradient")
ANSWERS = ("--rollout.engine", "answers")
VLLM_WORKER = ("--rollout.engine", "vllm", "--rollout.placement", "workers")
SETTINGS = {
    "unknown section": (["--trainig.steps", "5"], ["'trainig'", "did you mean 'training'?"]),
    "unknown key": (["--training.stepz", "5"], ["'stepz'", "did you mean 'steps'?"]),
    "no section": (["--steps", "5"], ["'--steps'", "--section.key value"]),
    "override without a value": (["--training.steps"], ["--training.steps has no value"]),
    "no TOML value": (["--training.steps", "5x"], ["'5x'", "is not a TOML value"]),
    "wrong type": (["--training.steps", "2.5"], ["training.steps = 2.5", "int"]),
    "out of bounds": (["--training.steps", "0"], ["training.steps = 0", "at least 1"]),
    "unknown choice": (["--objective.kind", "forward_lk"], ["'forward_lk'", "did you mean 'forward_kl'?"]),
    "unused option": (["--objective.clip_low", "0.1"], ["objective.clip_low = 0.1", "leave it out"]),
    "batch and minibatches": (["--schedule.minibatches", "3"], ["schedule.minibatches = 3", "choose a divisor"]),
    "hybrid of own answers": ([*HYBRID, "dense"], ["rollout.engine = 'native'", "rollout.engine = 'answers'"]),
    "hybrid of a hotter student": (
        [*HYBRID, "sampled", *ANSWERS, "--rollout.sampling.temperature", "2.0"],
        ["hybrid weighs tokens", "rollout.sampling.temperature = 2.0"],
    ),
    "policy gradient of expert answers": ([*POLICY_GRADIENT, *ANSWERS], ["policy_gradient", "engine = 'native'"]),
    "student's samples that nobody reads": (
        ["--objective.kind", "mc_forward_kl", "--rollout.num_samples", "4"],
        ["rollout.num_samples = 4 has no effect", "set teacher.num_samples"],
    ),
    "top-k of a point mass": (
        ["--objective.kind", "reverse_kl", "--rollout.sampling.temperature", "0"],
        ["rollout.sampling.temperature = 0", "raise the temperature"],
    ),
    "top-k of truncated sampling": (
        [*POLICY_GRADIENT, "--objective.support", "student_topk", "--rollout.sampling.top_p", "0.9"],
        ["top_p = 0.9", "objective.support = 'sampled'"],
    ),
    "no run folder": (["--run.directory", ""], ["run.directory = ''"]),
    "no student": (["--student.path", "nowhere"], ["'nowhere'"]),
    "no teacher": (["--teacher.path", "nowhere"], ["'nowhere'"]),
    "teacher named by nothing": (["--teacher.path", ""], ["teacher.path is missing"]),
    "stop token": (["--rollout.sampling.stop_ids", "[77]"], ["stop id 77", "17 tokens"]),
    "prompts above the limit": (["--data.max_prompt_tokens", "5"], ["data.max_prompt_tokens = 5", "raise"]),
    "answers beyond the context": (
        ["--rollout.sampling.max_new_tokens", "124"],
        ["rollout.sampling.max_new_tokens = 124", "more than the context of student.path, 128"],
    ),
    "evaluation answers beyond the context": (
        ["--evaluation.sampling.max_new_tokens", "124"],
        ["evaluation.sampling.max_new_tokens = 124", "more than the context of student.path, 128"],
    ),
    "answers beyond a micro-batch": (
        ["--training.tokens_per_microbatch", "14"],
        ["prompt 'arithmetic-train:", "of 6 tokens", "15 input tokens", "training.tokens_per_microbatch = 14"],
    ),
    "answers of vLLM beyond a micro-batch": (
        [*VLLM_WORKER, "--training.tokens_per_microbatch", "14"],
        ["prompt 'arithmetic-train:", "rollout.sampling.max_new_tokens = 10", "15 input tokens"],
    ),
    "answers beyond the scorer": (
        ["--teacher.tokens_per_forward", "14"],
        ["rollout.sampling.max_new_tokens = 10", "15 input tokens", "teacher.tokens_per_forward = 14"],
    ),
    "expert answers beyond a micro-batch": (
        [*ANSWERS, "--training.tokens_per_microbatch", "25"],
        ["and its response of 23 tokens", "28 input tokens", "training.tokens_per_microbatch = 25"],
    ),
    "more problems than there are": (
        ["--data.arithmetic.num_train", "1000000"],
        ["data.arithmetic.skip_train + data.arithmetic.num_train = 1000000", "raise max_digits or ask for fewer"],
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dry_run", [False, True], ids=["", "dry run"])
def test_settings(workshop, capsys, name, dry_run):
    options, fragments = SETTINGS[name]
    before = snapshot(workshop.folder)
    flags = ["--dry-run"] if dry_run else []
    error = refused(capsys, "train", workshop.toml, "--run.directory", workshop.folder / "refused", *flags, *options)
    for fragment in fragments:
        assert fragment in error
    assert snapshot(workshop.folder) == before
    assert not (workshop.folder / "refused").exists()


@pytest.fixture
def own(tmp_path):
    """A workshop whose files a test may damage."""
    return make_workshop(tmp_path)


def test_no_configuration(own, capsys):
    assert str(own.folder / "none.toml") in refused(capsys, "train", own.folder / "none.toml")
    assert "is a folder" in refused(capsys, "train", own.folder)
    own.toml.write_text("[run\n")
    assert "is not valid TOML" in refused(capsys, "train", own.toml)
    own.toml.write_text("[training]\nsteps = 1\nsteps = 2\n")
    assert f"{own.toml} is not valid TOML" in refused(capsys, "eval", own.toml)


def test_a_teacher_in_workers(own, capsys):
    """What it cannot hold is refused before it starts; evaluation answers, which it never sees, may be longer."""
    workers = ("--teacher.placement", "workers", "--teacher.workers", 1)
    long = ("--evaluation.sampling.max_new_tokens", 70)
    assert run_cli("train", own.toml, "--dry-run", *workers, *long) == 0
    capsys.readouterr()
    assert "training.tokens_per_microbatch = 60" in refused(capsys, "train", own.toml, *long)
    expected = short_teacher(own)
    assert expected in refused(capsys, "train", own.toml, *workers)


def remove_weights(own):
    (own.folder / "student/model.safetensors").unlink()
    return "holds neither model.safetensors nor"


def truncate_weights(own):
    file = own.folder / "student/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return f"{file} is truncated or damaged"


def empty_weights(own):
    file = own.folder / "teacher/model.safetensors"
    file.write_bytes(b"")
    return f"{file} is truncated or damaged"


def remove_config(own):
    (own.folder / "student/config.json").unlink()
    return "config.json"


def break_config(own):
    (own.folder / "teacher/config.json").write_text('{"model_type": "llama",')
    return "config.json"


def foreign_config(own):
    config = own.folder / "student/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "mamba"}))
    return "'mamba'"


def other_shape(own):
    config = own.folder / "student/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 64}))
    return "has the shape"


def remove_tokenizer(own):
    for file in (own.folder / "student").glob("token*"):
        file.unlink()
    return "has no tokenizer"


def break_tokenizer(own):
    (own.folder / "student/tokenizer.json").write_text("{")
    return "cannot read the tokenizer"


def small_embedding(own):
    shutil.rmtree(own.folder / "student")
    save_model(own.folder / "student", "llama", seed=0, vocab_size=16)
    return "the tokenizer has 17 tokens and the model's embedding only 16 rows"


def small_teacher(own):
    shutil.rmtree(own.folder / "teacher")
    save_model(own.folder / "teacher", "llama", seed=0, vocab_size=16)
    return "teacher.path"


def short_teacher(own):
    shutil.rmtree(own.folder / "teacher")
    save_model(own.folder / "teacher", "llama", seed=0, max_position_embeddings=15)
    return "more than the context of teacher.path, 15"


def other_tokenizer(own):
    shutil.rmtree(own.folder / "teacher")
    save_model(own.folder / "teacher", "llama", seed=0, vocab_size=110, tokenizer=make_chat_tokenizer())
    return "student and teacher have different tokenizers (17 and 105 tokens"


DAMAGES = (
    *(remove_weights, truncate_weights, empty_weights, remove_config, break_config, foreign_config, other_shape),
    *(remove_tokenizer, break_tokenizer, other_tokenizer, small_embedding, small_teacher, short_teacher),
)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_models(own, capsys, damage):
    expected = damage(own)
    before = snapshot(own.folder)
    assert expected in refused(capsys, "train", own.toml)
    assert snapshot(own.folder) == before
    assert not (own.folder / "run").exists()


PROMPTS = {
    "empty file": ("", "the file has no rows"),
    "broken line": ('{"prompt": "1"}\n{"prompt": ', "prompts.jsonl:2: broken JSON"),
    "no prompt": ('{"question": "1"}\n', "data.prompt_field"),
    "empty prompt": ('{"prompt": " "}\n', "is empty"),
    "too long": ('{"prompt": "1+2="}\n{"prompt": "1111+222="}\n', "prompts.jsonl:2: the prompt has 9 tokens"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_files(own, capsys, name):
    text, expected = PROMPTS[name]
    (own.folder / "prompts.jsonl").write_text(text)
    options = ("--data.task", "files", "--data.train", own.folder / "prompts.jsonl", "--data.template", "plain")
    assert expected in refused(capsys, "train", own.toml, *options)
    assert not (own.folder / "run").exists()


def test_missing_prompt_files(own, capsys):
    plain = ("--data.task", "files", "--data.template", "plain")
    assert "data.train is missing" in refused(capsys, "train", own.toml, *plain)
    missing = ("--data.train", own.folder / "none.jsonl")
    assert "there is no such file" in refused(capsys, "train", own.toml, *plain, *missing)
    text = ("--data.train", own.folder / "prompts.txt")
    assert "only .jsonl and .parquet files are read" in refused(capsys, "train", own.toml, *plain, *text)
    (own.folder / "p.jsonl").write_text('{"prompt": "1+2="}\n')
    chat = ("--data.task", "files", "--data.train", own.folder / "p.jsonl")
    assert "data.template = 'plain'" in refused(capsys, "train", own.toml, *chat)


def test_prompts_without_what_they_need(own, capsys):
    (own.folder / "p.jsonl").write_text('{"prompt": "1+2=", "response": "3", "answer": 3}\n{"prompt": "1+1="}\n')
    options = ("--data.task", "files", "--data.train", own.folder / "p.jsonl", "--data.template", "plain")
    error = refused(capsys, "train", own.toml, *options, *ANSWERS)
    assert "'p.jsonl:2' has no response" in error
    assert "data.response_field" in error
    graded = (*options, "--data.evaluation", own.folder / "p.jsonl")
    for command in ("train", "eval"):
        error = refused(capsys, command, own.toml, *graded)
        assert "'p.jsonl:2' has no reference answer" in error
        assert "data.answer_field" in error
    assert "set data.evaluation to a file that has some" in refused(capsys, "eval", own.toml, *options)
    assert not (own.folder / "run").exists()


def test_export(own, capsys):
    output = own.folder / "out"
    assert "no complete checkpoint" in refused(capsys, "export", own.folder / "run", output)
    run = own.train("run")
    capsys.readouterr()
    assert "no checkpoint of step 2" in refused(capsys, "export", run, output, "--step", 2)
    before = snapshot(own.folder)
    assert "nothing is overwritten" in refused(capsys, "export", run, own.folder / "teacher")
    assert snapshot(own.folder) == before
    weights = run / "checkpoints/step-000003/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"{weights} is truncated or damaged" in refused(capsys, "export", run, output)
    assert not list(own.folder.glob("out*"))


def test_eval_of_weights_that_are_drawn_anew(workshop, capsys):
    error = refused(capsys, "eval", workshop.toml, "--student.initialize", "random")
    assert "add --student.initialize checkpoint" in error


def test_export_to_where_nothing_can_be_written(workshop, capsys):
    run = workshop.train("exported")
    capsys.readouterr()
    assert run_cli("export", run, workshop.toml / "out") == 1
    error = capsys.readouterr().err
    assert error.startswith(f"titan-opd export: error: the model could not be written to {workshop.toml}/out")
    assert error.count("\n") == 1


def test_a_run_that_diverges_stops_before_it_saves_damaged_weights(workshop, capsys):
    """Nobody looks at these weights until the last step: no answers are sampled, nothing is evaluated."""
    options = (*ANSWERS, "--teacher.engine", "none", "--objective.kind", "cross_entropy")
    often = ("--checkpoint.every", 1, "--training.steps", 9, "--optimizer.learning_rate", 1e30)
    run = workshop.folder / "diverged"
    error = refused(capsys, "train", workshop.toml, "--run.directory", run, *options, *often)
    assert "the gradient's norm is nan in optimizer step" in error
    assert "lower optimizer.learning_rate" in error
    for checkpoint in (run / "checkpoints").iterdir():
        weights = load_file(checkpoint / "model.safetensors")
        assert all(weight.isfinite().all() for weight in weights.values())


@pytest.mark.parametrize(
    "arguments",
    ["", "trian", "train", "export run", "export run out --dtype int8", "export run out --unknown 1", "train a b"],
)
def test_the_command_line_itself(own, capsys, arguments, monkeypatch):
    monkeypatch.chdir(own.folder)
    try:
        status = run_cli(*arguments.split())
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    assert "error: " in capsys.readouterr().err.splitlines()[-1]
