"""Steps under torch's profiler, and memory that runs out."""

from __future__ import annotations

import gzip
import json
import re

import pytest
import torch

from titan_opd.config.document import document
from titan_opd.config.observe import ProfileConfig
from titan_opd.errors import StorageError
from titan_opd.observe import PhaseClock, trace
from titan_opd.observe.out_of_memory import _ADVICE, explain_out_of_memory
from titan_opd.observe.profiler import StepProfiler

CPU = torch.device("cpu")


def run_steps(profiler, first, last):
    """Each with a phase and a span named after it; the files that were written."""
    clock, paths = PhaseClock(), []
    for step in range(first, last + 1):
        profiler.begin_step(step)
        with clock.phase(f"train {step}"), trace.span(f"forward {step}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        paths += profiler.end_step(step)
    return paths


def names_in(path):
    with gzip.open(path, "rt") as file:
        return [event.get("name") for event in json.load(file)["traceEvents"]]


def test_the_steps_of_the_window_and_no_others_are_profiled_by_phase(tmp_path):
    profiler = StepProfiler(ProfileConfig(first_step=2, num_steps=2), tmp_path, 0, CPU)
    (path,) = run_steps(profiler, 1, 5)
    assert path == tmp_path / "profile" / "trainer-0-steps-2-3.json.gz"
    names = names_in(path)
    for step, count in ((1, 0), (2, 1), (3, 1), (4, 0)):
        assert names.count(f"train {step}") == names.count(f"forward {step}") == count
    assert "aten::mm" in names
    profiler.close()
    assert list((tmp_path / "profile").iterdir()) == [path]


def test_a_resumed_run_profiles_what_is_left_of_the_window(tmp_path):
    profiler = StepProfiler(ProfileConfig(first_step=2, num_steps=3), tmp_path, 0, CPU)
    (path,) = run_steps(profiler, 4, 6)
    assert path.name == "trainer-0-steps-4-4.json.gz"
    assert "train 4" in names_in(path)


def test_the_other_processes_are_not_profiled(tmp_path):
    config = ProfileConfig(first_step=1, num_steps=1, ranks=(1, 3))
    assert run_steps(StepProfiler(config, tmp_path, 0, CPU), 1, 2) == []
    assert [path.name for path in run_steps(StepProfiler(config, tmp_path, 3, CPU), 1, 2)] == [
        "trainer-3-steps-1-1.json.gz"
    ]


def test_a_run_that_ends_within_the_window_leaves_the_profiler_free(tmp_path):
    profiler = StepProfiler(ProfileConfig(first_step=1, num_steps=5), tmp_path, 0, CPU)
    assert run_steps(profiler, 1, 2) == []
    profiler.close()
    assert list(tmp_path.iterdir()) == []
    assert len(run_steps(StepProfiler(ProfileConfig(first_step=1, num_steps=1), tmp_path, 0, CPU), 1, 1)) == 1


def test_spans_are_in_the_runs_own_trace_too(tmp_path):
    with trace.open_tracer(tmp_path, "trainer", 0) as tracer:
        run_steps(StepProfiler(ProfileConfig(first_step=1, num_steps=1), tmp_path, 0, CPU), 1, 1)
        path = tracer.path
    assert '"forward 1"' in path.read_text()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "profile").write_text("a file in the way")
    profiler = StepProfiler(ProfileConfig(first_step=1, num_steps=1), tmp_path, 0, CPU)
    with pytest.raises(StorageError, match=r"cannot write to .*profile"):
        run_steps(profiler, 1, 1)


def test_the_memory_of_a_cpu_has_no_snapshot(tmp_path):
    with pytest.raises(ValueError, match=r"profile.memory = true .* none is here"):
        StepProfiler(ProfileConfig(first_step=1, memory=True), tmp_path, 0, CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_snapshot_of_a_gpus_memory(tmp_path):
    profiler = StepProfiler(ProfileConfig(first_step=1, num_steps=1, memory=True), tmp_path, 0, torch.device("cuda"))
    _, snapshot = run_steps(profiler, 1, 1)
    assert snapshot.stat().st_size > 0


# Out of memory


def planted(where, snapshot, folder):
    """A phase in which the memory runs out."""
    clock = PhaseClock()
    with explain_out_of_memory(folder, "trainer", 2, phase=lambda: clock.latest, snapshot=snapshot):
        with clock.phase("pack"):
            pass
        with clock.phase(where):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    ("where", "options"),
    [
        (
            "train",
            (
                "training.tokens_per_microbatch",
                "training.logits_chunk_mb",
                "training.recompute_activations",
                "parallel.cpu_offload",
            ),
        ),
        ("rollout", ("rollout.max_concurrent", "rollout.vllm.kv_cache_mb")),
        ("score", ("teacher.tokens_per_forward",)),
    ],
)
def test_memory_that_runs_out_leaves_a_snapshot_and_says_what_to_change(tmp_path, where, options):
    with pytest.raises(ValueError, match="trainer 2's device has run out") as caught:
        planted(where, lambda path: path.write_text("a snapshot"), tmp_path)
    assert (tmp_path / "oom_trainer_2.pickle").read_text() == "a snapshot"
    text = str(caught.value)
    for part in (f"in the phase {where!r}", "Tried to allocate 2.00 GiB", "oom_trainer_2.pickle", *options):
        assert part in text
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_a_snapshot_that_cannot_be_written_hides_nothing(tmp_path):
    def fail(path):
        raise OSError("no space left")

    with pytest.raises(ValueError, match=r"run out in the phase 'train'.*could not be written.*no space left"):
        planted("train", fail, tmp_path)


def test_every_option_that_is_advised_exists():
    known = document()
    for advice in _ADVICE.values():
        for section, name in re.findall(
            r"\b((?:training|rollout|teacher|weights|parallel|evaluation)[\w.]*)\.(\w+)", advice
        ):
            table = known.split(f"## [{section}]")[1].split("\n## ")[0]
            assert f"| `{name}` |" in table, f"{section}.{name}"


def test_other_errors_are_their_own(tmp_path):
    with (
        pytest.raises(RuntimeError, match="mine"),
        explain_out_of_memory(tmp_path, "trainer", 0, phase=lambda: None),
    ):
        raise RuntimeError("mine")
    assert list(tmp_path.iterdir()) == []
