"""The CUDA module, built here by nvcc without a GPU: everything is compiled in, and nothing spills."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kernel_table
import pytest
from standalone_build import KERNELS, ROOT

SCHEMAS = ROOT / "csrc" / "schemas.h"
# Only the address of a CUDA torch's function is missing here, and the linker looks for it at the first call.
LIST_CUDA_OPERATORS = """
import importlib.util, json, os, sys
sys.setdlopenflags(os.RTLD_LAZY)
import torch
for name, path in zip(("titan_opd._C", "titan_opd._CUDA"), sys.argv[1:], strict=True):
    spec = importlib.util.spec_from_file_location(name, path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("titan_opd::")]
print(json.dumps([name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")]))
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> tuple[Path, str]:
    """The folder of the built modules, and nvcc's account."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    folder = tmp_path_factory.mktemp("cuda_build")
    return folder / "lib" / "titan_opd", kernel_table.build(folder)


def tensor_operators(schemas: str) -> list[str]:
    """The operators of schemas.h that take tensors."""
    definitions = re.findall(r'library\.def\(((?:\s*"[^"]*")+)\s*\)', schemas)
    joined = ["".join(re.findall(r'"([^"]*)"', one)) for one in definitions]
    return [one.partition("(")[0] for one in joined if "Tensor" in one.partition("->")[0]]


def test_the_schemas_are_all_read():
    text = SCHEMAS.read_text()
    assert len(tensor_operators(text)) == text.count("library.def(")
    assert "gather_stats" in tensor_operators(text)


@pytest.mark.slow
def test_every_operator_has_a_cuda_implementation(build):
    folder, _ = build
    toolkit = Path(shutil.which("nvcc")).resolve().parents[1]
    libraries = [str(path.parent) for path in toolkit.rglob("libcudart.so")]
    modules = [str(next(folder.glob(f"{name}.*"))) for name in ("_C", "_CUDA")]
    output = subprocess.run(
        [sys.executable, "-c", LIST_CUDA_OPERATORS, *modules],
        env={**os.environ, "LD_LIBRARY_PATH": ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")])},
        capture_output=True,
        text=True,
    )
    assert output.returncode == 0, output.stderr
    implemented = json.loads(output.stdout)
    missing = [name for name in tensor_operators(SCHEMAS.read_text()) if f"titan_opd::{name}" not in implemented]
    assert not missing


@pytest.mark.slow
def test_no_kernel_spills(build):
    uses = kernel_table.read_uses(build[1])
    architectures = {use.architecture for use in uses}
    assert architectures == set(kernel_table.ARCHITECTURES)
    compiled = {use.kernel.partition("<")[0] for use in uses}
    written = {
        name
        for source in KERNELS.glob("*.cu")
        for name in re.findall(r"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(", source.read_text())
    }
    assert compiled == written
    wasteful = [use for use in uses if use.stack_bytes or use.spill_bytes]
    assert not wasteful


@pytest.mark.slow
def test_the_readme_has_the_compilers_table(build):
    nvcc, table = kernel_table.stored_table(kernel_table.README.read_text())
    if nvcc != kernel_table.nvcc_version():
        pytest.skip(f"the table is of nvcc {nvcc}, here is {kernel_table.nvcc_version()}")
    assert table == kernel_table.table(kernel_table.read_uses(build[1])), "run: python scripts/kernel_table.py --write"


SPILLING = """\
ptxas info    : Compiling entry function '_ZN9titan_opd10sum_kernelIfEEvT_' for 'sm_80'
ptxas info    : Function properties for _ZN9titan_opd10sum_kernelIfEEvT_
    16 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes stack, 64 bytes smem, 488 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN9titan_opd10sum_kernelIfEEvT_' for 'sm_90a'
ptxas info    : Function properties for _ZN9titan_opd10sum_kernelIfEEvT_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="no c++filt on PATH")
def test_spills_are_read_and_shown():
    spilling, clean = kernel_table.read_uses(SPILLING)
    assert (spilling.kernel, spilling.architecture) == ("sum_kernel<float>", "sm_80")
    assert (spilling.registers, spilling.shared_bytes, spilling.stack_bytes, spilling.spill_bytes) == (255, 64, 16, 16)
    assert (clean.registers, clean.shared_bytes, clean.stack_bytes, clean.spill_bytes) == (32, 0, 0, 0)
    table = kernel_table.table([spilling, clean])
    assert "| `sum_kernel` | 1 | 255 | 32 | 0 - 64 | 0 - 32 |" in table
    text = f"before\n{kernel_table.START.format(nvcc='1.2')}\nold\n{kernel_table.END}\nafter\n"
    written = kernel_table.with_table(text, "13.0", table)
    assert kernel_table.stored_table(written) == ("13.0", table)
    assert written.startswith("before\n")
    assert written.endswith("\nafter\n")


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="no c++filt on PATH")
def test_an_account_that_is_not_understood_is_an_error():
    with pytest.raises(ValueError, match=r"account of sum_kernel<float> is not understood"):
        kernel_table.read_uses(SPILLING.replace("registers", "things"))
    with pytest.raises(ValueError, match=r"sum_kernel was not compiled in the same variants for sm_80 and sm_90a"):
        kernel_table.table(kernel_table.read_uses(SPILLING)[:1])


@pytest.mark.parametrize(
    ("declaration", "name"),
    [
        ("void titan_opd::(anonymous namespace)::sum_kernel<titan_opd::Half>(titan_opd::Task<A>)", "sum_kernel<Half>"),
        (
            "void titan_opd::pair_kernel<float, titan_opd::Bfloat16, (bool)1>(int)",
            "pair_kernel<float, Bfloat16, (bool)1>",
        ),
        ("titan_opd::copy_kernel(unsigned char*, long)", "copy_kernel"),
    ],
)
def test_short_names(declaration, name):
    assert kernel_table.short_name(declaration) == name
