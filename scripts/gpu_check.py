"""Checks every operator and the loss head on a device against float64, measures them, and writes a report.

    python scripts/gpu_check.py --device cuda --benchmarks --tests --out DIR      what scripts/gpu_check.sh runs
    python scripts/gpu_check.py --device cpu                                      the checks alone, on any machine

Needs torch and the built extension; --tests also pytest, hypothesis and numpy, and says so
where they are missing. Exit code 1 when a check or a test fails. The report, DIR/report.md and DIR/report.json, is
written anew after every part, so that an interrupted run leaves what it had.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "scripts"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import torch  # noqa: E402
from gpu_timing import machine  # noqa: E402
from operator_problems import PROBLEMS, Sizes, copied, in_float64, relative_errors, tensor_operators  # noqa: E402

from tests.losses.scenes import OBJECTIVES, Scene, build_scene  # noqa: E402
from titan_opd.ops import describe  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Odd ones: rows that start anywhere, less than a vector, several of the kernels' blocks, more ids than columns.
SIZES = ((5, 1237, 7), (3, 7, 9), (2, 151_937, 64), (64, 32_000, 64), (1, 300_001, 3))
# The largest error over the largest number: float32 sums, or one rounding to the output's type.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float64: 1e-12, torch.int64: 0.0}
SCENES = (
    {"num_rows": 23, "vocab": 517, "hidden_size": 48, "num_candidates": 8, "scale": 0.4},
    {"num_rows": 9, "vocab": 4099, "hidden_size": 96, "num_candidates": 16, "scale": 0.3},
)
# Beside float64 on the same rounded inputs: float32 products; bfloat16 logits and one rounding of the gradients. Norms,
# because single elements of a bfloat16 gradient may be sums of opposite signs.
HEAD_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
# Their gradients have no jumps that a logit's rounding to bfloat16 crosses, and are no small differences.
SMOOTH_KINDS = ("forward_kl", "reverse_kl", "mixed_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "alpha_beta")
SMOOTH_KINDS += ("mc_forward_kl", "cross_entropy")
NEEDED_FOR_TESTS = ("pytest", "hypothesis", "numpy")


@dataclass(frozen=True)
class Result:
    """One comparison: an error and what it may be at most."""

    part: str
    name: str
    setting: str
    output: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


def check_operators(device: torch.device) -> Iterator[Result]:
    """Every operator, dtype and size against its reference in float64 on the CPU."""
    for name in tensor_operators():
        if name not in PROBLEMS:
            raise ValueError(f"scripts/operator_problems.py has no problem for the operator {name}: add one")
    for problem in PROBLEMS.values():
        for dtype in DTYPES:
            for seed, (num_rows, vocab, num_ids) in enumerate(SIZES):
                sizes = Sizes(num_rows, vocab, num_ids, dtype)
                inputs = problem.inputs(sizes, device, seed)
                expected = problem.call(in_float64(inputs))
                actual = problem.call(copied(inputs))
                for output, value, error in relative_errors(actual, expected):
                    yield Result("operator", problem.operator, str(sizes), output, error, TOLERANCE[value.dtype])


def check_loss_head(device: torch.device) -> Iterator[Result]:
    """Every objective against its definition on full logits, in float64 on the CPU, with gradients by autograd."""
    for name, objective in OBJECTIVES.items():
        for seed, shape in enumerate(SCENES):
            for dtype in HEAD_TOLERANCE:
                if dtype == torch.bfloat16 and objective.kind not in SMOOTH_KINDS:
                    continue
                scene = build_scene(objective, seed=seed, **shape).to(dtype)
                expected = reference_results(scene)
                actual = head_results(moved(scene, device))
                setting = f"{shape['num_rows']} x {shape['vocab']}, {str(dtype).removeprefix('torch.')}"
                for output, error in norm_errors(actual, expected).items():
                    yield Result("loss head", name, setting, output, error, HEAD_TOLERANCE[dtype])


def reference_results(scene: Scene) -> dict[str, torch.Tensor]:
    """Loss, values and gradients by the reference in float64 of the same inputs: what is left is the head's own error.

    The dense hybrid draws, and the reference does not: there the head itself, on the CPU and with the same draws.
    """
    if scene.objective.kind == "hybrid" and scene.objective.support == "dense":
        return head_results(scene)
    scene = scene.to(torch.float64)
    scene = replace(scene, hidden=scene.hidden.requires_grad_(), weight=scene.weight.requires_grad_())
    per_token = scene.reference()
    loss = (scene.token_weights * per_token).sum() / len(per_token)
    grads = torch.autograd.grad(loss, (scene.hidden, scene.weight))
    return {"loss": loss.detach(), "per token": per_token.detach(), "hidden": grads[0], "weight": grads[1]}


def head_results(scene: Scene) -> dict[str, torch.Tensor]:
    """By the fused head, in chunks of a few rows. The draws come from a generator on the CPU, for every device."""
    generator = torch.Generator().manual_seed(5)
    output, grad_hidden, grad_weight = scene.gradients(logits_chunk_mb=0.05, generator=generator)
    return {"loss": output.loss.detach(), "per token": output.per_token, "hidden": grad_hidden, "weight": grad_weight}


def moved(scene: Scene, device: torch.device) -> Scene:
    scores = {name: value.to(device) for name, value in vars(scene.scores).items() if value is not None}
    return replace(
        scene.with_scores(**scores),
        hidden=scene.hidden.to(device),
        weight=scene.weight.to(device),
        token_weights=scene.token_weights.to(device),
    )


def norm_errors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """The norm of each difference over the norm of what is expected."""
    return {
        name: ((actual[name].cpu().double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)).item()
        for name, wanted in expected.items()
    }


def summary(results: list[Result]) -> str:
    """A table of the largest errors, one line for each name and output; failures in full below it."""
    lines = ["| part | what | output | largest error / tolerance | at | |", "|---|---|---|---|---|---|"]
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for one in results:
        groups.setdefault((one.part, one.name, one.output), []).append(one)
    for (part, name, output), members in groups.items():
        # Relative to its own tolerance, for dtypes differ; NaN is the worst.
        worst = max(members, key=lambda one: one.error / max(one.tolerance, 1e-30) if one.error == one.error else 1e300)
        verdict = "ok" if all(one.passed for one in members) else "FAILED"
        figures = f"{worst.error:.1e} / {worst.tolerance:.0e}"
        lines.append(f"| {part} | {name} | {output} | {figures} | {worst.setting} | {verdict} |")
    failed = [one for one in results if not one.passed]
    lines.append(f"\n{len(results)} comparisons, {len(failed)} failed")
    lines += [f"- {one.name}, {one.setting}, {one.output}: {one.error:.3g} above {one.tolerance:.0e}" for one in failed]
    return "\n".join(lines)


class Report:
    """Markdown for people, JSON for programs."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.sections: list[str] = []
        self.data: dict[str, Any] = {}

    def add(self, title: str, text: str, key: str, data: Any) -> None:
        print(f"\n## {title}\n\n{text}", flush=True)
        self.sections.append(f"## {title}\n\n{text}\n")
        self.data[key] = data
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "report.md").write_text(
                "# Checks and figures on this machine\n\n" + "\n".join(self.sections)
            )
            (self.folder / "report.json").write_text(json.dumps(self.data, indent=1) + "\n")


def run_benchmarks(report: Report, device: torch.device) -> None:
    """Full sizes, so on a GPU only."""
    import profile_kernels
    import profile_loss_head

    options = profile_kernels.parse([])
    sizes = Sizes(options.rows, options.vocab, options.ids, profile_kernels.DTYPES[options.dtype])
    profiles = profile_kernels.profile(list(PROBLEMS.values()), sizes, device, options.rounds)
    copy = f"copy: {profiles[0].copy_bytes_per_second / 1e12:.2f} TB/s"
    text = f"{profile_kernels.DEFINITION.format(rounds=options.rounds)}\n\n{profile_kernels.table(profiles)}\n\n{copy}"
    report.add("Operators, measured", text, "operators", [one.record() for one in profiles])

    options = profile_loss_head.parse([])
    result = profile_loss_head.profile(options, device)
    text = f"{profile_loss_head.DEFINITION.format(rounds=options.rounds)}\n\n{profile_loss_head.table(result)}"
    report.add("Loss head, measured", text, "loss_head", result)


def run_tests(report: Report) -> bool:
    """The tests that need a GPU, with the machine's own pytest."""
    missing = [name for name in NEEDED_FOR_TESTS if importlib.util.find_spec(name) is None]
    if missing:
        report.add("Tests", f"not run: {', '.join(missing)} not installed", "tests", {"missing": missing})
        return True
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/kernels"]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    text = f"`{' '.join(command[1:])}`\n\n```\n{result.stdout[-4000:]}\n```"
    report.add("Tests", text, "tests", {"exit_code": result.returncode})
    return result.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    parser.add_argument("--benchmarks", action="store_true", help="also measure, at full size (a GPU only)")
    parser.add_argument("--tests", action="store_true", help="also run tests/kernels -m gpu")
    parser.add_argument("--out", type=Path, help="the report's folder")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no CUDA device; --device cpu checks the CPU's kernels")
    if options.benchmarks and device.type != "cuda":
        sys.exit("--benchmarks is for --device cuda")

    report = Report(options.out)
    facts = machine(device)
    report.add("Machine", "\n".join(f"- {name}: {value}" for name, value in facts.items()), "machine", facts)
    passed = True
    for title, key, check in (
        (f"{describe(device)}", "operator_checks", check_operators),
        ("Loss head", "loss_head_checks", check_loss_head),
    ):
        results = list(check(device))
        passed = passed and all(one.passed for one in results)
        report.add(title, summary(results), key, [{**asdict(one), "passed": one.passed} for one in results])
    if options.benchmarks:
        run_benchmarks(report, device)
    if options.tests:
        passed = run_tests(report) and passed
    verdict = "all checks passed" if passed else "FAILED: see above"
    report.add("Verdict", verdict, "passed", passed)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
