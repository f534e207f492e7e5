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
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
INSTALL_COMMAND = "pip install --no-build-isolation --use-pep517 -e ."
OLDEST_TORCH = (2, 11)
CSRC = ROOT / "csrc"
CXX_FLAGS = [
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
]
EMULATION_FLAGS = ["-Wno-unknown-pragmas"]  # #pragma unroll is nvcc's
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


def compiler_command() -> str:
    return os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++"


def check_compiler() -> None:
    """Exits with what to install when the C++ compiler or Python's headers are missing."""
    compiler = shlex.split(compiler_command())[0]
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


def compiled_for_cuda(torch: Path) -> bool:
    return re.search(r"^cuda.*= '", (torch / "version.py").read_text(), re.MULTILINE) is not None


def find_cuda() -> Path | None:
    """The CUDA toolkit's folder, by CUDA_HOME or by what nvcc on PATH says of itself; None when there is none."""
    if os.environ.get("CUDA_HOME"):
        return Path(os.environ["CUDA_HOME"])
    if shutil.which("nvcc") is None:
        return None
    plan = subprocess.run(["nvcc", "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)
    if top is None:
        sys.exit(f"titan_opd: nvcc ({shutil.which('nvcc')}) does not say where its toolkit is; name it with CUDA_HOME")
    return Path(top[1].strip()).resolve()


def wanted(variable: str, default: bool) -> bool:
    """Whether an object is to be built: by an environment variable of "0" or "1", else by default."""
    value = os.environ.get(variable)
    if value not in (None, "0", "1"):
        sys.exit(f"titan_opd: {variable} = {value!r} must be 0 or 1")
    return default if value is None else value == "1"


def sources(*patterns: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in CSRC.glob(pattern))


def extension(name: str, files: list[str], torch: Path, **changes: list) -> Extension:
    """A module of csrc/ against the stable ABI; `changes` add to its include folders, macros, libraries and so on."""
    settings = {
        "depends": sources("**/*.h", "**/*.cuh"),
        "include_dirs": [str(torch / "include")],
        "define_macros": [("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION), ("Py_LIMITED_API", "0x030A0000")],
        "extra_compile_args": CXX_FLAGS,
        "library_dirs": [str(torch / "lib")],
        "libraries": ["torch_cpu", "c10"],
        "extra_link_args": [],
    }
    settings = {key: value + changes.get(key, []) for key, value in settings.items()}
    return Extension(name, files, py_limited_api=True, language="c++", **settings)


def extensions() -> list[Extension]:
    """titan_opd._C always; ._CUDA beside a torch for CUDA; ._EMU, for tests, where it is asked for."""
    torch, cuda = find_torch(), find_cuda()
    found = [extension("titan_opd._C", sources("*.cpp", "cpu/*.cpp"), torch)]
    if wanted("TITAN_OPD_CUDA", default=compiled_for_cuda(torch)):
        if cuda is None:
            sys.exit(
                "titan_opd: this torch is built for CUDA, but there is no nvcc: put the CUDA toolkit's on PATH, name "
                "its folder with CUDA_HOME, or build for the CPU only with TITAN_OPD_CUDA=0"
            )
        found.append(
            extension(
                "titan_opd._CUDA",
                sources("cuda/*.cpp", "cuda/*.cu"),
                torch,
                include_dirs=[str(cuda / "include")],
                library_dirs=[str(cuda / "lib64"), str(cuda / "lib")],
                libraries=["cudart"],
                define_macros=[("USE_CUDA", None)],
                # libtorch.so brings in libtorch_cuda.so, which has aoti_torch_get_current_cuda_stream, though nothing
                # is taken from libtorch.so itself; the flag must stand before the library that it keeps.
                extra_link_args=["-Wl,--no-as-needed", "-ltorch"],
            )
        )
    if wanted("TITAN_OPD_EMU", default=False):
        files = sources("emu/*.cpp", "cuda/*.cpp", "cuda/*.cu")
        files.remove("csrc/cuda/module.cpp")
        found.append(extension("titan_opd._EMU", files, torch, define_macros=[("TITAN_OPD_EMULATED", None)]))
    return found


class BuildExtensions(build_ext):
    """Compiles .cu files: with nvcc for a GPU, with g++ over csrc/emu for the emulation."""

    def build_extension(self, extension: Extension) -> None:
        kernels = [file for file in extension.sources if file.endswith(".cu")]
        extension.sources = [file for file in extension.sources if not file.endswith(".cu")]
        folder = Path(self.build_temp) / extension.name
        folder.mkdir(parents=True, exist_ok=True)
        compile_kernel = emulation_command if extension.name.endswith("_EMU") else nvcc_command
        commands = []
        for file in kernels:
            target = folder / f"{Path(file).stem}.o"
            extension.extra_objects.append(str(target))
            commands.append([*compile_kernel(), "-c", file, "-o", str(target)])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for command in commands:
                print(shlex.join(command))
            list(pool.map(subprocess.check_call, commands))
        super().build_extension(extension)


def nvcc_command() -> list[str]:
    """TITAN_OPD_CUDA_ARCHS: a list such as "80;90a" (the default), or "90a" alone to build faster."""
    architectures = os.environ.get("TITAN_OPD_CUDA_ARCHS", "80;90a").split(";")
    targets = [f"-gencode=arch=compute_{one},code=sm_{one}" for one in architectures]
    # -Xptxas -v: registers, shared memory and spills of every kernel, in the build's output.
    return [
        f"{find_cuda()}/bin/nvcc",
        "-std=c++17",
        "-O3",
        "-lineinfo",
        "-Xptxas",
        "-v",
        *targets,
        "-Xcompiler",
        "-fPIC",
    ]


def emulation_command() -> list[str]:
    return [
        *shlex.split(compiler_command()),
        *CXX_FLAGS,
        *EMULATION_FLAGS,
        "-fPIC",
        "-DTITAN_OPD_EMULATED",
        "-x",
        "c++",
    ]


check_compiler()
setup(
    name="titan_opd",
    version=re.search(r'__version__ = "([^"]+)"', (ROOT / "titan_opd" / "__init__.py").read_text())[1],
    description="A native torch.distributed trainer for on-policy distillation of language models",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["titan_opd", "titan_opd.*"]),
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExtensions},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    install_requires=[
        f"torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}",
        "transformers",
        "safetensors",
        "numpy",
        "pyarrow",
        "tomli; python_version < '3.11'",
        "rich",
        "tensorboard",
        "pyzmq>=26",
        "msgspec>=0.19",
        "nvidia-ml-py>=12.535",
    ],
    extras_require={
        "gpu": ["flash-attn"],
        "float8": ["torchao>=0.18,<0.19"],
        "vllm": ["vllm>=0.32,<0.34"],
        "test": ["pytest", "pytest-xdist", "hypothesis", "ruff", "torchao>=0.18,<0.19"],
    },
    entry_points={"console_scripts": ["titan-opd = titan_opd.cli:main"]},
)
