"""The whole of it: a teacher learns sums, a student with few labels does not, and distillation closes the gap.

About 50 seconds on one core. With the seeds 0, 1 and 2 the teacher got 85, 93 and 84 % right, the student 8, 6 and 3 %
before and 79, 95 and 68 % after distillation, and the KL to the teacher fell from 1.08, 1.06 and 1.35 to 0.04, 0.01 and
0.09 nats a token; the margins below leave room for other processors' rounding.
"""

from __future__ import annotations

import pytest

from tests.end_to_end.workshop import run_cli
from tests.helpers.arithmetic import save_model
from titan_opd.observe import read_metrics

TOML = """
[run]
threads = 1

[student]
path = "{folder}/warm_start"

[teacher]
path = "{folder}/teacher"
top_k = 8

[objective]
kind = "forward_kl"

[rollout]
max_concurrent = 100

[rollout.sampling]
max_new_tokens = 28

[data]
task = "arithmetic"
max_prompt_tokens = 8

[data.arithmetic]
min_digits = 1
max_digits = 2
num_train = 3000
num_eval = 100
skip_train = 400

[training]
steps = 300

[optimizer]
learning_rate = 5e-3
warmup_steps = 10
decay = "linear"

[evaluation.sampling]
max_new_tokens = 28

[observe]
tensorboard = false
"""
SHAPE = {"vocab_size": 17, "hidden_size": 64, "intermediate_size": 192, "head_dim": 16, "initializer_range": 0.02}
ON_ANSWERS = (
    *("--objective.kind", "cross_entropy", "--teacher.engine", "none", "--rollout.engine", "answers"),
    *("--data.arithmetic.skip_train", 0, "--optimizer.learning_rate", 4e-3),
)


@pytest.mark.slow
def test_distillation_teaches_what_few_labels_do_not(tmp_path):
    large = save_model(tmp_path / "large", "qwen3", seed=0, num_hidden_layers=3, **SHAPE)
    small = save_model(tmp_path / "small", "llama", seed=1, num_hidden_layers=2, **SHAPE)
    toml = tmp_path / "run.toml"
    toml.write_text(TOML.format(folder=tmp_path))

    def train(name, *options):
        """The evaluations before the first and after the last step."""
        assert run_cli("train", toml, "--run.directory", tmp_path / name, *options) == 0
        return read_metrics(tmp_path / name, "evaluation")

    _, teacher = train("teacher", *ON_ANSWERS, "--student.path", large, "--training.steps", 200)
    few_labels = ("--data.arithmetic.num_train", 400, "--training.steps", 120)
    _, student = train("warm_start", *ON_ANSWERS, "--student.path", small, *few_labels)
    before, after = train("distill")

    assert teacher["accuracy"] > 0.7
    assert student["accuracy"] < 0.3
    assert before["accuracy"] == student["accuracy"]
    assert after["accuracy"] > before["accuracy"] + 0.3
    assert after["teacher_kl"] < before["teacher_kl"] / 5
