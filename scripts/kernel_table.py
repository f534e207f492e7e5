"""The table of registers and shared memory in csrc/README.md, as the CUDA compiler says.

    python scripts/kernel_table.py            build with nvcc for sm_80 and sm_90a and print the table
    python scripts/kernel_table.py --write    and put it into csrc/README.md
    python scripts/kernel_table.py --log FILE read a build's output instead of building

A spill is a register that the compiler had to keep in memory; a stack frame holds spills and arrays that found no
registers. Both should be 0; the table has their bytes where they are not.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "csrc" / "README.md"
ARCHITECTURES = ("sm_80", "sm_90a")
START, END = "<!-- kernel_table: nvcc {nvcc} -->", "<!-- end of kernel_table -->"


@dataclass(frozen=True, order=True)
class KernelUse:
    """What one kernel takes on one architecture.

    Attributes:
        kernel: its name with its element types, `gather_stats_kernel<Half>`.
        architecture: `sm_90a`.
        registers: of each thread.
        shared_bytes: static shared memory of a block; dynamic shared memory comes on top.
        stack_bytes, spill_bytes: memory of each thread, which should be none; spill_bytes counts stores and loads.
    """

    kernel: str
    architecture: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


def build(folder: Path) -> str:
    """Build all modules but the emulation through setup.py into `folder`; the output, with nvcc's `-Xptxas -v`.

    Raises:
        RuntimeError: the build failed; the message is its output.
    """
    architectures = ";".join(name.removeprefix("sm_") for name in ARCHITECTURES)
    command = [sys.executable, "setup.py", "build_ext"]
    result = subprocess.run(
        [*command, "--build-temp", str(folder / "temp"), "--build-lib", str(folder / "lib")],
        cwd=ROOT,
        env={**os.environ, "TITAN_OPD_CUDA": "1", "TITAN_OPD_EMU": "0", "TITAN_OPD_CUDA_ARCHS": architectures},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode != 0:
        raise RuntimeError(f"the build for CUDA failed:\n{result.stdout}")
    return result.stdout


def nvcc_version(nvcc: str = "nvcc") -> str:
    """`13.0.88`, of the nvcc on PATH."""
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"V([\d.]+)", output)[1]


def read_uses(output: str) -> list[KernelUse]:
    """Every kernel of a build's output, in the order of names and architectures.

    Raises:
        ValueError: a kernel was compiled and nothing, or something unknown, is said about it.
    """
    uses = []
    entries = re.split(r"ptxas info\s*: Compiling entry function ", output)[1:]
    names = demangled([re.match(r"'(\S+)'", entry)[1] for entry in entries])
    for entry, name in zip(entries, names, strict=True):
        architecture = re.match(r"'\S+' for '(\w+)'", entry)
        memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        registers = re.search(r"Used (\d+) registers.*", entry)
        if architecture is None or memory is None or registers is None:
            raise ValueError(f"nvcc's account of {name} is not understood: {entry[:400]!r}")
        shared = re.search(r"(\d+) bytes smem", registers[0])
        uses.append(
            KernelUse(
                kernel=name,
                architecture=architecture[1],
                registers=int(registers[1]),
                shared_bytes=int(shared[1]) if shared else 0,
                stack_bytes=int(memory[1]),
                spill_bytes=int(memory[2]) + int(memory[3]),
            )
        )
    return sorted(uses)


def demangled(symbols: Iterable[str]) -> list[str]:
    """Kernels' names and template arguments, without namespaces and parameters: `gather_stats_kernel<Half>`."""
    lines = subprocess.run(
        ["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [short_name(line) for line in lines]


def short_name(declaration: str) -> str:
    """Of `void titan_opd::(anonymous namespace)::sum_kernel<titan_opd::Half>(titan_opd::Task<titan_opd::Half>)`."""
    name = declaration.replace("(anonymous namespace)", "").removeprefix("void ")
    name = re.sub(r"\b\w*::", "", re.sub(r"_GLOBAL__N__\w+::", "", name)).replace("::", "")
    depth = 0
    for i, character in enumerate(name):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth == 0:
            return name[:i]
    return name


def table(uses: Iterable[KernelUse]) -> str:
    """In Markdown, a line for each kernel: the range over the types that it is compiled for."""
    of_kernel: dict[str, dict[str, list[KernelUse]]] = {}
    for use in uses:
        name = use.kernel.partition("<")[0]
        of_kernel.setdefault(name, {}).setdefault(use.architecture, []).append(use)
    heading = [
        "kernel",
        "variants",
        *(f"registers, {one}" for one in ARCHITECTURES),
        "static shared",
        "stack and spills",
    ]
    rows = [heading, ["---"] * len(heading)]
    for name, by_architecture in of_kernel.items():
        variants = [{use.kernel for use in by_architecture.get(one, [])} for one in ARCHITECTURES]
        if any(some != variants[0] for some in variants):
            raise ValueError(f"{name} was not compiled in the same variants for {' and '.join(ARCHITECTURES)}")
        everywhere = [use for one in ARCHITECTURES for use in by_architecture[one]]
        rows.append(
            [
                f"`{name}`",
                str(len(variants[0])),
                *(_range(use.registers for use in by_architecture[one]) for one in ARCHITECTURES),
                _range(use.shared_bytes for use in everywhere),
                _range(use.stack_bytes + use.spill_bytes for use in everywhere),
            ]
        )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _range(numbers: Iterable[int]) -> str:
    numbers = sorted(numbers)
    return str(numbers[0]) if numbers[0] == numbers[-1] else f"{numbers[0]} - {numbers[-1]}"


def stored_table(text: str) -> tuple[str, str]:
    """The nvcc version and the table that a README holds."""
    pattern = re.escape(START).replace(re.escape("{nvcc}"), r"([\d.]+)") + r"\n(.*?)\n" + re.escape(END)
    found = re.search(pattern, text, re.DOTALL)
    if found is None:
        raise ValueError(f"no table between {START!r} and {END!r}")
    return found[1], found[2]


def with_table(text: str, nvcc: str, new_table: str) -> str:
    """A README with another table."""
    old_nvcc, old_table = stored_table(text)
    old = f"{START.format(nvcc=old_nvcc)}\n{old_table}\n{END}"
    return text.replace(old, f"{START.format(nvcc=nvcc)}\n{new_table}\n{END}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, help="the output of a build with -Xptxas -v, instead of building")
    parser.add_argument("--write", action="store_true", help="put the table into csrc/README.md")
    options = parser.parse_args()
    if options.log is not None:
        output = options.log.read_text()
    else:
        with tempfile.TemporaryDirectory() as folder:
            output = build(Path(folder))
    new_table = table(read_uses(output))
    print(new_table)
    if options.write:
        README.write_text(with_table(README.read_text(), nvcc_version(), new_table))


if __name__ == "__main__":
    main()
