"""A folder with models and a configuration that the runs of these tests start from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.helpers.arithmetic import save_model
from titan_opd.cli import main

TOML = """
[run]
directory = "{folder}/run"
threads = 1

[student]
path = "{folder}/student"

[teacher]
path = "{folder}/teacher"
top_k = 5

[objective]
kind = "forward_kl"

[rollout]
max_concurrent = 5

[rollout.sampling]
max_new_tokens = 10

[data]
task = "arithmetic"
max_prompt_tokens = 8

[data.arithmetic]
max_digits = 2
num_train = 40
num_eval = 6

[schedule]
batch = 8

[training]
steps = 3
tokens_per_microbatch = 60

[optimizer]
learning_rate = 1e-2

[evaluation.sampling]
temperature = 1.0
max_new_tokens = 10

[observe]
tensorboard = false
"""


@dataclass(frozen=True)
class Workshop:
    """A folder with `student/`, `teacher/` and `run.toml`, whose run of 3 steps takes a fraction of a second."""

    folder: Path

    @property
    def toml(self) -> Path:
        return self.folder / "run.toml"

    def train(self, directory: str, *options: object) -> Path:
        """Train into the folder `directory` of the workshop, which is returned."""
        path = self.folder / directory
        assert run_cli("train", self.toml, "--run.directory", path, *options) == 0
        return path


def run_cli(*arguments: object) -> int:
    """`titan-opd` with these arguments, in this process; the exit status."""
    return main([str(argument) for argument in arguments])


def make_workshop(folder: Path) -> Workshop:
    save_model(folder / "student", "llama", seed=0)
    save_model(folder / "teacher", "qwen3", seed=1)
    (folder / "run.toml").write_text(TOML.format(folder=folder))
    return Workshop(folder)
