"""Which weight goes into which file."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.arithmetic import make_decoder
from titan_opd.models import ModelFiles
from titan_opd.models.model_files import split_names


def largest(num_bytes, files):
    return max(sum(num_bytes[name] for name in names) for names in files)


def every_split(names):
    """All ways to cut the names into files of neighbours."""
    for cuts in itertools.product([False, True], repeat=len(names) - 1):
        files = [[names[0]]]
        for name, cut in zip(names[1:], cuts, strict=True):
            if cut:
                files.append([])
            files[-1].append(name)
        yield files


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=7),
    limit=st.integers(1, 60),
    num_processes=st.integers(1, 4),
)
def test_few_rounds_of_equal_files(sizes, limit, num_processes):
    """Against all ways there are: no fewer rounds would do, and in as many no split has a smaller largest file."""
    num_bytes = {f"weight {number}": size for number, size in enumerate(sizes)}
    files = split_names(num_bytes, limit, num_processes)
    assert [name for names in files for name in names] == list(num_bytes)
    assert all(len(names) == 1 or largest(num_bytes, [names]) <= limit for names in files)

    allowed = [
        split
        for split in every_split(list(num_bytes))
        if all(len(names) == 1 or largest(num_bytes, [names]) <= limit for names in split)
    ]
    rounds = -(-len(files) // num_processes)
    assert rounds == min(-(-len(split) // num_processes) for split in allowed)
    best = min(largest(num_bytes, split) for split in allowed if -(-len(split) // num_processes) <= rounds)
    assert largest(num_bytes, files) == best


@pytest.mark.parametrize("num_processes", [1, 2, 3, 100])
def test_every_file_is_written_once_and_in_its_round(num_processes):
    config = make_decoder("llama", seed=0).config
    files = ModelFiles(config, torch.float32, num_processes=num_processes, max_file_bytes=20_000)
    own = [list(files.files_of(rank)) for rank in range(num_processes)]
    assert sorted(itertools.chain(*own)) == list(range(len(files.names)))
    for number, round_ in enumerate(files.rounds()):
        assert list(round_) == [one[number] for one in own if len(one) > number]
    assert len(files.names) >= min(num_processes, len(files.shapes) // 2)
