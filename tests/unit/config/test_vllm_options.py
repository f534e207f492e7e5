"""Options of vLLM that contradict others, or would do nothing, are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_opd.config import load_config

TOML = """
[student]
path = "student"
[teacher]
path = "teacher"
[objective]
kind = "forward_kl"
support = "teacher_topk"
[data]
task = "arithmetic"
[training]
steps = 1
"""
STUDENT = {"rollout.engine": "vllm"}
TEACHER = {"teacher.engine": "vllm"}
SPLIT = {"rollout.vllm.tensor_parallel_size": "2"}
WORKERS = {"rollout.placement": "workers", "rollout.workers": "1"}


def load(folder: Path, options: dict[str, str]) -> object:
    (folder / "run.toml").write_text(TOML)
    return load_config(folder / "run.toml", [f"--{name}={value}" for name, value in options.items()])


def test_a_run_with_vllm(tmp_path: Path) -> None:
    options = {"rollout.python": ".venv-vllm/bin/python"}
    config = load(tmp_path, STUDENT | TEACHER | WORKERS | SPLIT | options)
    assert config.rollout.vllm.tensor_parallel_size == 2
    assert config.rollout.python == ".venv-vllm/bin/python"
    assert config.teacher.vllm.search_k == 1024


def test_an_engine_over_the_trainers_processes(tmp_path: Path) -> None:
    assert load(tmp_path, STUDENT | SPLIT).rollout.vllm.tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"rollout.vllm.kv_cache_mb": "8"}, r"\[rollout.vllm\] has no effect with rollout.engine = 'native'"),
        ({"teacher.vllm.search_k": "8"}, r"\[teacher.vllm\] has no effect with teacher.engine = 'native'"),
        (STUDENT | {"rollout.vllm.kv_cache_mb": "-1"}, "rollout.vllm.kv_cache_mb = -1.0 must be at least 0"),
        (STUDENT | {"rollout.python": "python3"}, r"rollout.python = 'python3' .* rollout.workers = 0"),
        (STUDENT | {"rollout.fixed_shapes": "true"}, "rollout.fixed_shapes = true is a promise"),
        (TEACHER | {"teacher.fixed_shapes": "true"}, "teacher.fixed_shapes = true is a promise"),
        (STUDENT | SPLIT | {"schedule.mode": "async"}, "tensor_parallel_size = 2 needs devices beside"),
        (STUDENT | SPLIT | {"teacher.placement": "workers", "teacher.workers": "1"}, "needs devices beside"),
        (TEACHER | {"teacher.vllm.tensor_parallel_size": "2"}, "set teacher.placement = 'workers'$"),
        (STUDENT | WORKERS | {"rollout.vllm.sleep": "true"}, "rollout.vllm.sleep = true frees memory"),
        (STUDENT | {"rollout.vllm.sleep": "true", "schedule.mode": "async"}, "rollout.vllm.sleep = true frees memory"),
        (TEACHER | {"objective.support": "dense"}, "needs whole vocabularies, which vLLM does not hand out"),
        (
            TEACHER | {"objective.kind": "mc_forward_kl", "objective.support": "sampled"},
            "the teacher's own draws",
        ),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, options: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        load(tmp_path, options)
