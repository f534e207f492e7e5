"""What a person sees when the build cannot work: one line with the reason and the fix, and no traceback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools

from titan_opd.ops import extension

ROOT = Path(__file__).parents[2]


def run_setup_py(*python_options: str, **environment: str) -> str:
    """setup.py's one line on stderr; it must have failed."""
    result = subprocess.run(
        [sys.executable, *python_options, "setup.py", "--version"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1, result
    (line,) = result.stderr.strip().splitlines()
    return line


def test_missing_compiler(tmp_path):
    line = run_setup_py(PATH=str(tmp_path), CXX="g++ -O2")
    assert line.startswith("titan_opd: no C++ compiler ('g++' is not on PATH)")
    assert "apt-get install g++" in line


def test_missing_torch(tmp_path):
    # -S leaves site-packages out; setuptools alone comes back.
    site_packages = Path(setuptools.__file__).parents[1]
    for package in ("setuptools", "_distutils_hack"):
        (tmp_path / package).symlink_to(site_packages / package)
    line = run_setup_py("-S", PYTHONPATH=str(tmp_path))
    assert line.startswith("titan_opd: no torch to build against")
    assert "pip install 'torch>=2.11' && pip install --no-build-isolation --use-pep517 -e ." in line


def test_old_torch(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.9.1+cu128'\n")
    line = run_setup_py(PYTHONPATH=str(tmp_path))
    assert line.startswith(f"titan_opd: torch 2.9.1+cu128 at {tmp_path}/torch is too old")
    assert "pip install --upgrade 'torch>=2.11'" in line


def test_missing_extension_names_the_build_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "titan_opd._C", None)  # what a failed search leaves behind
    with pytest.raises(ImportError, match=r"do not load .* run: pip install --no-build-isolation --use-pep517 -e \."):
        extension.load()


def test_a_command_without_the_extension_says_so_in_one_line():
    """None in sys.modules is a module that cannot be imported."""
    arguments = ["train", "train_configs/arithmetic/teacher.toml", "--dry-run"]
    command = (
        f"import sys; sys.modules['titan_opd._C'] = None; from titan_opd.cli import main; sys.exit(main({arguments}))"
    )
    result = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1, result
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("titan-opd train: error: titan_opd's compiled operators (titan_opd._C) do not load")
    assert line.endswith("run: pip install --no-build-isolation --use-pep517 -e .")


@pytest.mark.parametrize(
    ("python", "message"),
    [
        (
            "no-such-python",
            "setup: no 'no-such-python' on PATH: install Python 3.10 or newer, or name one with PYTHON=",
        ),
        ("./python3.9", "setup: ./python3.9 is Python 3.9, 3.10 or newer is needed: name another with PYTHON="),
    ],
)
def test_setup_script_without_a_fitting_python(tmp_path, python, message):
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    old_python = tmp_path / "python3.9"
    old_python.write_text('#!/bin/sh\ncase "$2" in *print*) echo 3.9 ;; *) exit 1 ;; esac\n')
    old_python.chmod(0o755)
    result = subprocess.run(
        [tmp_path / "scripts" / "setup.sh"], env={**os.environ, "PYTHON": python}, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout, result.stderr.strip()) == (1, "", message)
    assert not (tmp_path / ".venv").exists()
