"""The scripts for machines with a GPU, as far as they go without one: inputs, byte counts, tables, checks, messages."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gpu_check
import profile_kernels
import profile_loss_head
import pytest
import torch
from gpu_timing import Timing, machine, require_gpu
from operator_problems import PROBLEMS, Sizes, copied, in_float64, relative_errors, tensor_operators, traffic
from standalone_build import KERNELS, ROOT

CPU = torch.device("cpu")
SIZES = Sizes(num_rows=4, vocab=100, num_ids=3, dtype=torch.bfloat16)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def test_every_operator_has_a_problem():
    assert sorted(PROBLEMS) == sorted(tensor_operators())
    with_bytes = [parameters[0] for parameters in test_traffic.pytestmark[0].args[1]]
    assert sorted(with_bytes) == sorted(PROBLEMS)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_a_problem_is_repeatable_and_leaves_copies_alone(problem):
    inputs = problem.inputs(SIZES, CPU)
    first, second = problem.call(copied(inputs)), problem.call(copied(inputs))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, problem.call(copied(problem.inputs(SIZES, CPU))), rtol=0, atol=0)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_the_reference_is_another_code_than_the_kernel(problem):
    inputs = in_float64(problem.inputs(SIZES, CPU))
    with pytest.raises(RuntimeError, match="was called 0 times, not once"):
        traffic(problem, inputs)


@pytest.mark.parametrize(
    ("operator", "num_bytes"),
    [
        # logits, ids, temperatures; four sums and the candidates.
        ("gather_stats", 4 * 100 * 2 + 4 * 3 * 8 + 4 * 4 + 4 * 4 * 4 + 4 * 3 * 4),
        # logits twice, ids, g, four numbers of a row, temperatures.
        ("sparse_softmax_grad_", 2 * 4 * 100 * 2 + 4 * 3 * 8 + 4 * 3 * 4 + 4 * 4 * 4 + 4 * 4),
        # logits; ids, their logits, four sums.
        ("topk_logprobs", 4 * 100 * 2 + 4 * 3 * 8 + 4 * 3 * 4 + 4 * 4 * 4),
        # logits and keys; ids, scores and logits of three draws.
        ("gumbel_sample", 4 * 100 * 2 + 4 * 8 + 4 * 3 * (8 + 8 + 4)),
        # both logits, maxima and sums of both; nine sums.
        ("dense_pair_sums", 2 * 4 * 100 * 2 + 4 * 4 * 4 + 9 * 4 * 4),
        # the student's logits twice, the teacher's, maxima and sums of both, offsets and coefficients.
        ("dense_pair_grad_", 3 * 4 * 100 * 2 + 4 * 4 * 4 + 2 * 4 * 4),
        # float32 read, bfloat16 written.
        ("multi_copy", 4 * 100 * 4 + 4 * 100 * 2),
    ],
)
def test_traffic(operator, num_bytes):
    problem = PROBLEMS[operator]
    assert traffic(problem, problem.inputs(SIZES, CPU)) == num_bytes


def test_errors_are_relative_to_the_largest_number_and_see_what_is_not_finite():
    expected = {"x": torch.tensor([1.0, -4.0, math.inf], dtype=torch.float64), "ids": torch.tensor([1, 2])}
    near = {"x": torch.tensor([1.0, -4.2, math.inf]), "ids": torch.tensor([1, 3])}
    (_, _, error), (_, _, share) = relative_errors(near, expected)
    assert error == pytest.approx(0.05)
    assert share == 0.5
    for wrong in (math.nan, 7.0):
        ((_, _, error),) = relative_errors({"x": torch.tensor([1.0, -4.0, wrong])}, expected)
        assert error == math.inf


def test_profiles_table_and_json():
    timing = Timing.of([2.0, 1.0, 4.0])
    one = profile_kernels.Profile("gather_stats", SIZES, int(3e9), timing, copy_bytes_per_second=3e12)
    assert one.record()["milliseconds"] == {"median": 2.0, "fastest": 1.0, "slowest": 4.0}
    assert one.bytes_per_second == pytest.approx(1.5e12)
    assert one.share_of_copy == pytest.approx(0.5)
    json.dumps(one.record())
    line = profile_kernels.table([one]).splitlines()[-1]
    cells = "gather_stats | [4 x 100] bfloat16, 3 ids | 2.000 (1.000 - 4.000) | 3.00 | 1.50 | 0.50"
    assert line == f"| {cells} |"


def test_nsight_computes_filter_finds_the_kernels():
    kernels = re.findall(
        r"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(",
        "".join(source.read_text() for source in KERNELS.glob("*.cu")),
    )
    for operator in PROBLEMS:
        command = profile_kernels.ncu_command(operator, profile_kernels.parse(["--rows", "16"]))
        (name,) = [word.removeprefix("regex:") for word in command if word.startswith("regex:")]
        assert any(re.search(name, kernel) for kernel in kernels), operator
        assert command[-10:-2] == ["--rounds", "1", "--rows", "16", "--vocab", "131072", "--ids", "64"]


def test_the_loss_heads_two_ways_run_and_are_counted():
    options = profile_loss_head.parse(["--tokens", "6", "--hidden", "8", "--vocab", "50", "--candidates", "4"])
    for call in profile_loss_head.calls(options, CPU).values():
        call()
    assert profile_loss_head.flops(options) == 3 * 2 * 6 * 8 * 50
    times = {"products": Timing.of([1.0]), "head": Timing.of([1.25])}
    result = profile_loss_head.record(options, times, {"products": 2**30, "head": 2**29})
    assert result["ratio"] == 1.25
    assert "| head | 1.250 (1.250 - 1.250) | 0.50 | 1.25 |" in profile_loss_head.table(result)
    json.dumps(result)


def test_the_machine_is_described():
    facts = machine(CPU)
    assert facts["torch"] == torch.__version__
    assert all(facts.values())


@no_gpu
@pytest.mark.slow
def test_without_a_gpu_one_line_says_so():
    with pytest.raises(SystemExit, match="nothing can be timed on a GPU"):
        require_gpu()
    script = [sys.executable, str(ROOT / "scripts" / "gpu_check.py")]
    for arguments, message in (
        ([], "finds no CUDA device"),
        (["--device", "cpu", "--benchmarks"], "--benchmarks is for"),
    ):
        end = subprocess.run([*script, *arguments], capture_output=True, text=True)
        assert end.returncode == 1
        assert message in end.stderr
        assert len(end.stderr.splitlines()) == 1
    end = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert end.returncode == 1
    assert end.stderr.startswith("gpu_check: torch finds no CUDA device here")


# What a machine with torch, transformers and safetensors may lack.
IMPORT_WITHOUT_EXTRAS = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
sys.path.insert(0, "scripts")
import gpu_check, titan_opd.losses, titan_opd.ops
"""


@pytest.mark.slow
def test_the_checks_need_torch_alone():
    absent = {"pytest", "hypothesis", "numpy", "tomli", "rich", "pyarrow", "tensorboard", "torchao", "vllm"}
    if sys.version_info < (3, 11):
        absent.remove("tomli")  # Python's own comes with 3.11
    code = IMPORT_WITHOUT_EXTRAS.format(absent=sorted(absent))
    end = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert end.returncode == 0, end.stderr


@pytest.mark.slow
def test_the_whole_check_on_the_cpu(tmp_path):
    end = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--device", "cpu", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert end.returncode == 0, end.stdout + end.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] is True
    assert report["machine"]["torch"] == torch.__version__
    assert {one["name"] for one in report["operator_checks"]} == set(PROBLEMS)
    assert {one["name"] for one in report["loss_head_checks"]} == set(gpu_check.OBJECTIVES)
    text = (tmp_path / "report.md").read_text()
    assert "FAILED" not in text
    assert "all checks passed" in text


def test_a_wrong_operator_fails_the_check(monkeypatch, tmp_path):
    right = PROBLEMS["gather_stats"]

    def wrong(inputs):
        outputs = right.call(inputs)
        if inputs["logits_RV"].dtype == torch.bfloat16:
            outputs["lse"] = outputs["lse"] + 0.01
        return outputs

    monkeypatch.setattr(gpu_check, "PROBLEMS", {"gather_stats": replace(right, call=wrong)})
    monkeypatch.setattr(gpu_check, "tensor_operators", lambda: ["gather_stats"])
    monkeypatch.setattr(gpu_check, "SIZES", ((5, 1237, 7),))
    monkeypatch.setattr(gpu_check, "OBJECTIVES", {})
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--out", str(tmp_path)])
    assert gpu_check.main() == 1
    text = (tmp_path / "report.md").read_text()
    assert "9 comparisons, 1 failed" in text
    assert re.search(r"- gather_stats, \[5 x 1237\] bfloat16, 7 ids, lse: [\d.]+ above 3e-05", text)
    assert "FAILED: see above" in text


def test_an_operator_without_a_problem_is_an_error(monkeypatch):
    monkeypatch.setattr(gpu_check, "tensor_operators", lambda: ["new_operator"])
    with pytest.raises(ValueError, match=r"operator_problems\.py has no problem for the operator new_operator"):
        list(gpu_check.check_operators(CPU))


def test_missing_test_tools_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check, "NEEDED_FOR_TESTS", ("pytest", "no_such_tool"))
    report = gpu_check.Report(tmp_path)
    assert gpu_check.run_tests(report)
    assert "not run: no_such_tool not installed" in Path(tmp_path / "report.md").read_text()
