"""Builds titan_opd and its compiled operators: `pip install --no-build-isolation --use-pep517 -e .`

The operators (csrc/) use LibTorch's stable ABI and Python's limited API only: torch is located here, not imported, and
one build serves every torch from 2.11 and every Python from 3.10.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent
INSTALL_COMMAND = "pip install --no-build-isolation --use-pep517 -e ."
OLDEST_TORCH = (2, 11)
TORCH_TARGET_VERSION = f"0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000"


def find_torch() -> Path:
    """The folder of the installed torch, or an exit with the command that puts one there."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        sys.exit(
            "titan_opd: no torch to build against. Install it, then build beside it, without isolation: "
            f"pip install 'torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}' && {INSTALL_COMMAND}"
        )
    folder = Path(spec.submodule_search_locations[0])
    version = re.search(r"__version__ = '((\d+)\.(\d+)[^']*)'", (folder / "version.py").read_text())
    if version is not None and (int(version[2]), int(version[3])) < OLDEST_TORCH:
        sys.exit(
            f"titan_opd: torch {version[1]} at {folder} is too old. "
            f"pip install --upgrade 'torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}' && {INSTALL_COMMAND}"
        )
    return folder


def check_compiler() -> None:
    """Exits with what to install when the C++ compiler or Python's headers are missing."""
    command = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++"
    compiler = shlex.split(command)[0]
    if shutil.which(compiler) is None:
        sys.exit(
            f"titan_opd: no C++ compiler ({compiler!r} is not on PATH). Install one (Debian, Ubuntu: apt-get install "
            "g++), or name yours: CXX=/path/to/g++"
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        sys.exit(
            f"titan_opd: Python's headers are missing ({headers}/Python.h). Install them (Debian, Ubuntu: apt-get "
            "install python3-dev)"
        )


def cpu_extension(torch: Path) -> Extension:
    """titan_opd._C: the operators' schemas and CPU kernels."""
    return Extension(
        "titan_opd._C",
        sources=sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.cpp")),
        depends=sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.h")),
        include_dirs=[str(torch / "include")],
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION), ("Py_LIMITED_API", "0x030A0000")],
        extra_compile_args=[
            "-std=c++17",
            "-O3",
            "-g0",
            "-fvisibility=hidden",
            "-Wall",
            # The kernels' loops: `omp simd` without an OpenMP runtime, fused multiply-adds where the CPU has them.
            # Never -ffast-math: the kernels rely on -inf and NaN.
            "-fopenmp-simd",
            "-ffp-contract=fast",
            "-fno-math-errno",
            "-fno-trapping-math",
        ],
        library_dirs=[str(torch / "lib")],
        libraries=["torch_cpu", "c10"],
        py_limited_api=True,
        language="c++",
    )


check_compiler()
setup(
    name="titan_opd",
    version=re.search(r'__version__ = "([^"]+)"', (ROOT / "titan_opd" / "__init__.py").read_text())[1],
    description="A native torch.distributed trainer for on-policy distillation of language models",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["titan_opd", "titan_opd.*"]),
    ext_modules=[cpu_extension(find_torch())],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    install_requires=[
        f"torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}",
        "transformers",
        "safetensors",
        "numpy",
        "pyarrow",
        "tomli",
        "rich",
        "tensorboard",
    ],
    extras_require={
        "gpu": ["flash-attn"],
        "float8": ["torchao"],
        "vllm": ["vllm"],
        "test": ["pytest", "pytest-xdist", "hypothesis", "ruff"],
    },
    entry_points={"console_scripts": ["titan-opd = titan_opd.cli:main"]},
)
