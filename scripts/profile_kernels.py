"""Times every operator of csrc on a GPU against the memory traffic that it cannot avoid.

    python scripts/profile_kernels.py [--rows 8192] [--vocab 131072] [--ids 64] [--dtype bfloat16] [--operators NAME ..]
    python scripts/profile_kernels.py --ncu       one Nsight Compute command for each operator, run if ncu is on PATH

Prints its definition, the machine, a table in Markdown, and with --json FILE appends a line for each operator. Needs a
CUDA device; the inputs are random.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_timing import WARMUP, Timing, copy_bandwidth, machine, require_gpu, time_in_turn
from operator_problems import PROBLEMS, Problem, Sizes, traffic

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DEFINITION = f"""\
One call of the operator's Python face on all rows, by CUDA events, {{rounds}} rounds after {WARMUP} for warm-up: median
(fastest - slowest), ms. Traffic: each tensor that the operator reads, writes or returns counted once, one that it
changes in place twice. Share of copy: traffic over the median, over the bandwidth of copying 1 GiB within the GPU's
memory in the same run (read and written bytes counted alike): 1.0 is as fast as the memory allows. In-place operators
work on their own results from the second round on, which costs them the same."""


@dataclass(frozen=True)
class Profile:
    """One operator's time."""

    operator: str
    sizes: Sizes
    num_bytes: int
    timing: Timing
    copy_bytes_per_second: float

    @property
    def bytes_per_second(self) -> float:
        return self.num_bytes / (self.timing.median * 1e-3)

    @property
    def share_of_copy(self) -> float:
        return self.bytes_per_second / self.copy_bytes_per_second

    def record(self) -> dict[str, Any]:
        """For a line of JSON."""
        return {
            "operator": self.operator,
            "rows": self.sizes.num_rows,
            "vocab": self.sizes.vocab,
            "ids": self.sizes.num_ids,
            "dtype": str(self.sizes.dtype).removeprefix("torch."),
            "bytes": self.num_bytes,
            "milliseconds": {
                "median": self.timing.median,
                "fastest": self.timing.fastest,
                "slowest": self.timing.slowest,
            },
            "bytes_per_second": self.bytes_per_second,
            "copy_bytes_per_second": self.copy_bytes_per_second,
            "share_of_copy": self.share_of_copy,
        }


def table(profiles: list[Profile]) -> str:
    lines = ["| operator | sizes | ms | traffic, GB | TB/s | share of copy |", "|---|---|---|---|---|---|"]
    for one in profiles:
        cells = (
            one.operator,
            str(one.sizes),
            str(one.timing),
            f"{one.num_bytes / 1e9:.2f}",
            f"{one.bytes_per_second / 1e12:.2f}",
            f"{one.share_of_copy:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def profile(problems: list[Problem], sizes: Sizes, device: torch.device, rounds: int) -> list[Profile]:
    """Each operator's time on a CUDA device."""
    bandwidth = copy_bandwidth(device, rounds)
    profiles = []
    for problem in problems:
        num_bytes = traffic(problem, problem.inputs(sizes, device))
        inputs = problem.inputs(sizes, device)
        call = lambda problem=problem, inputs=inputs: problem.call(inputs)  # noqa: E731
        timing = time_in_turn({problem.operator: call}, rounds)[problem.operator]
        profiles.append(Profile(problem.operator, sizes, num_bytes, timing, bandwidth))
        del inputs, call
        torch.cuda.empty_cache()
    return profiles


def ncu_command(operator: str, options: argparse.Namespace) -> list[str]:
    """Nsight Compute on one launch of the operator's kernels, after the warm-up."""
    sizes = ["--rows", str(options.rows), "--vocab", str(options.vocab), "--ids", str(options.ids)]
    return [
        *("ncu", "--set", "full", "--kernel-name", f"regex:{operator.removesuffix('_')}"),
        *("--launch-skip", str(WARMUP), "--launch-count", "1", "--force-overwrite", "--export", f"{operator}.ncu-rep"),
        *(sys.executable, str(Path(__file__).resolve()), "--operators", operator, "--rounds", "1"),
        *(*sizes, "--dtype", options.dtype),
    ]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--ids", type=int, default=64, help="ids a row (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--operators", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="append a line for each operator to this file")
    parser.add_argument("--ncu", action="store_true", help="Nsight Compute instead of times")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.ncu:
        run_ncu(options)
        return
    device = require_gpu()
    print(DEFINITION.format(rounds=options.rounds), "\n")
    facts = machine(device)
    print(", ".join(f"{name}: {value}" for name, value in facts.items()), "\n")
    sizes = Sizes(options.rows, options.vocab, options.ids, DTYPES[options.dtype])
    profiles = profile([PROBLEMS[name] for name in options.operators], sizes, device, options.rounds)
    print(f"copy: {profiles[0].copy_bytes_per_second / 1e12:.2f} TB/s\n\n{table(profiles)}")
    if options.json is not None:
        with options.json.open("a") as file:
            for one in profiles:
                file.write(json.dumps({**one.record(), "machine": facts}) + "\n")


def run_ncu(options: argparse.Namespace) -> None:
    commands = [ncu_command(operator, options) for operator in options.operators]
    for command in commands:
        print(shlex.join(command))
    if shutil.which("ncu") is None:
        print("ncu is not on PATH: run these where it is", file=sys.stderr)
        return
    require_gpu()
    for command in commands:
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
