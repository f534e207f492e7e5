"""What a run leaves on disk, compared with another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from titan_opd.checkpoint import checkpoint_steps
from titan_opd.observe import read_metrics
from titan_opd.observe.lines import read_lines


def assert_same_run(run: Path, whole: Path) -> None:
    """Everything is equal to the bit, but for the times: checkpoints and optimizer, journal, metrics."""
    assert (run / "journal.jsonl").read_bytes() == (whole / "journal.jsonl").read_bytes()
    assert metrics_without_times(run) == metrics_without_times(whole)
    names = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == names
    for name in names:
        left, right = run / "checkpoints" / name, whole / "checkpoints" / name
        assert model_bytes(left) == model_bytes(right), name
        assert_equal(optimizer_state(left, run), optimizer_state(right, run))


def assert_close_run(run: Path, whole: Path) -> None:
    """The same samples were trained, and the last weights agree up to rounding."""
    assert read_lines(run / "journal.jsonl") == read_lines(whole / "journal.jsonl")
    left, right = (load_weights(max(checkpoint_steps(path).values())) for path in (run, whole))
    assert left.keys() == right.keys()
    for name, weight in left.items():
        torch.testing.assert_close(weight, right[name], atol=1e-5, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


def model_bytes(folder: Path) -> dict[str, bytes]:
    """The files of a model's weights."""
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors*")}


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a model, from whatever files they are in."""
    return {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


def metrics_without_times(run: Path) -> list[dict[str, Any]]:
    timed = ("time", "seconds/", "tokens_per_second/", "mfu", "gpu/")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in read_metrics(run)]


def optimizer_state(checkpoint: Path, scratch: Path) -> dict[str, Any]:
    file = scratch / "optimizer.pt"
    dcp_to_torch_save(checkpoint / "trainer", file)
    state = torch.load(file, weights_only=False)
    file.unlink()
    return state


def assert_equal(left: Any, right: Any) -> None:
    """Equal to the bit, in nested tables of tensors."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for name, value in left.items():
            assert_equal(value, right[name])
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


def trained_numbers(run: Path) -> list[int]:
    """The numbers of the samples that were trained, step by step."""
    return [sample["number"] for line in read_lines(run / "journal.jsonl") for sample in line["samples"]]
