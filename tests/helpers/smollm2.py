"""SmolLM2-135M-Instruct, for slow tests that want a real model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_smollm2.py"


def smollm2_folder() -> Path:
    """The model's folder in the cache, fetched when needed; the test is skipped, with the reason, when it cannot be."""
    result = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(result.stderr.strip().splitlines()[0])
    return Path(result.stdout.splitlines()[-1])
