from __future__ import annotations

import pytest
import torch

from tests.end_to_end.workshop import make_workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory):
    """For runs that leave `student/`, `teacher/` and `run.toml` as they are, into directories of their own."""
    return make_workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(autouse=True)
def _threads():
    """A run's `run.threads` does not outlive its test."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
