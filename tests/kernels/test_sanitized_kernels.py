"""Every CUDA kernel on exactly-sized arrays under AddressSanitizer and UndefinedBehaviorSanitizer, in emulation."""

from __future__ import annotations

from pathlib import Path

import pytest
from standalone_build import (
    CHECKS,
    FIBERS,
    KERNELS,
    SANITIZER_EXIT_CODE,
    check_sources,
    compile_object,
    launchers,
    link,
    run,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def frame(tmp_path_factory) -> list[Path]:
    """What every program needs: its main function and the emulation."""
    folder = tmp_path_factory.mktemp("frame")
    return [compile_object(source, folder) for source in (CHECKS / "main.cpp", FIBERS)]


@pytest.fixture(scope="module")
def planted(tmp_path_factory, frame) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    return link([*frame, compile_object(CHECKS / "planted.cpp", folder)], folder / "planted")


def test_every_kernel_keeps_to_its_arrays(tmp_path, frame):
    sources = [*check_sources(), *sorted(KERNELS.glob("*.cu"))]
    program = link([*frame, *(compile_object(source, tmp_path) for source in sources)], tmp_path / "checks")
    end = run(program)
    assert end.returncode == 0, end.stdout
    assert "FAILED" not in end.stdout
    assert end.stdout.count("ok ") >= 3 * len(sources)


def test_every_launcher_has_a_check():
    checks = "".join(source.read_text() for source in check_sources())
    without = [name for name in launchers() if f"{name}(" not in checks]
    assert not without, f"write tests/kernels/standalone/<operator>.cpp for {', '.join(without)}"


@pytest.mark.parametrize(
    ("fault", "report"),
    [
        ("planted_read_past_an_array", "heap-buffer-overflow"),
        ("planted_write_before_an_array", "heap-buffer-overflow"),
        ("planted_write_past_dynamic_shared_memory", "heap-buffer-overflow"),
        ("planted_write_past_static_shared_memory", "index 31 out of bounds for type 'float [31]'"),
        ("planted_read_past_a_threads_own_array", "index 4 out of bounds for type 'int [4]'"),
        ("planted_misaligned_vector", "misaligned address"),
    ],
)
def test_a_planted_fault_is_seen(planted, fault, report):
    end = run(planted, fault)
    assert end.returncode == SANITIZER_EXIT_CODE, end.stdout
    assert report in end.stdout


def test_the_planted_faults_are_all_tried(planted):
    tried = [parameter[0] for parameter in test_a_planted_fault_is_seen.pytestmark[0].args[1]]
    assert sorted(run(planted, "--list").stdout.split()) == sorted(tried)
