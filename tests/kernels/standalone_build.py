"""Compiles the checks of tests/kernels/standalone, without torch and Python, over csrc/emu.

AddressSanitizer sees accesses outside arrays, shared memory and a thread's own variables; UndefinedBehaviorSanitizer
16-byte accesses that are not aligned, shifts by too much and indices past a fixed array.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECKS = Path(__file__).parent / "standalone"
KERNELS = ROOT / "csrc" / "cuda"
FIBERS = ROOT / "csrc" / "emu" / "fibers.cpp"
SANITIZERS = ("-fsanitize=address,alignment,bounds,shift", "-fno-sanitize-recover=alignment,bounds,shift")
SANITIZER_EXIT_CODE = 99
FLAGS = (
    # Not optimised: half of the time goes into compiling.
    *("-std=c++17", "-O0", "-g1", "-Wno-unknown-pragmas", "-fno-omit-frame-pointer", "-pthread"),
    *("-DTITAN_OPD_EMULATED", *SANITIZERS),
)


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "g++"))


def compile_object(source: Path, folder: Path) -> Path:
    """The object file of a .cpp or .cu file, in `folder`."""
    target = folder / f"{source.name}.o"
    subprocess.run([*compiler(), *FLAGS, "-x", "c++", "-c", str(source), "-o", str(target)], check=True)
    return target


def link(objects: list[Path], target: Path) -> Path:
    subprocess.run([*compiler(), *SANITIZERS, "-pthread", *map(str, objects), "-o", str(target)], check=True)
    return target


def run(program: Path, *checks: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """The program's end, SANITIZER_EXIT_CODE where a sanitizer ended it, and all it printed; a hang raises."""
    option = f"exitcode={SANITIZER_EXIT_CODE}"
    return subprocess.run(
        [program, *checks],
        env={**os.environ, "ASAN_OPTIONS": option, "UBSAN_OPTIONS": option},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )


def launchers(header: Path = KERNELS / "kernels.h") -> list[str]:
    """The names that csrc/cuda/kernels.h declares."""
    return sorted(set(re.findall(r"\b(launch_\w+)\(", header.read_text())))


def check_sources() -> list[Path]:
    """All checks that must pass; planted.cpp is apart."""
    return sorted(path for path in CHECKS.glob("*.cpp") if path.name not in ("main.cpp", "planted.cpp"))
