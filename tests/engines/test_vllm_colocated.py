"""vLLM in the trainer's processes: after every optimizer step it is what a vLLM is that loads the checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engines import vllm_cases as cases
from tests.engines.vllm_cases import FAMILIES, Case
from tests.helpers.vllm import needs_vllm
from tests.helpers.worlds import run_world

pytestmark = needs_vllm
# Every family, tied and untied, with each engine; every trainer's layout with each engine. An engine in two processes
# of a trainer that is one process is `VllmStream` in tests/engines/test_vllm_stream.py.
ONE_PROCESS = [Case(family, tied, "1x1", 1) for family in FAMILIES for tied in (True, False)]
TWO_PROCESSES = [
    Case("llama", True, "2x1", 1),
    Case("qwen3", False, "1x2", 1),
    *(
        Case(family, tied, layout, 2)
        for family, layouts in zip(FAMILIES, (("2x1", "1x2"), ("1x2", "2x1"), ("2x1", "1x2")), strict=True)
        for tied, layout in zip((True, False), layouts, strict=True)
    ),
]
ALL_OF_TWO = [
    Case(*factors)
    for factors in itertools.product(FAMILIES, (True, False), ("2x1", "1x2"), (1, 2))
    if Case(*factors) not in TWO_PROCESSES
]


def follow(all_cases: Sequence[Case], folder: Path, *, size: int, num_steps: int = 2) -> list[dict[str, Any]]:
    return run_world(cases.follow, all_cases, folder, num_steps, size=size, folder=folder)


@pytest.fixture(scope="module")
def in_one(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return follow(ONE_PROCESS, tmp_path_factory.mktemp("one"), size=1)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    return run_world(cases.follow_and_share, TWO_PROCESSES, folder, 2, size=2, folder=folder)


@pytest.fixture
def in_two(two_processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [found["cases"] for found in two_processes]


@pytest.fixture
def shared(two_processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [found["shared"] for found in two_processes]


def check_steps(found: list[dict[str, Any]], case: Case) -> None:
    for process in found:
        steps = process[str(case)]
        assert len(steps) >= 2
        for step in steps:
            assert step["moved"] > 0.01  # else an engine that took nothing would pass
            assert step["same tokens"]
            assert step["gap"] <= 1e-5
            assert step["gap to trainer"] <= 1e-4 * max(1.0, step["moved"])  # rounding grows with what is rounded


@pytest.mark.parametrize("case", ONE_PROCESS, ids=str)
def test_an_updated_engine_equals_a_fresh_one(in_one: list[dict[str, Any]], case: Case) -> None:
    check_steps(in_one, case)


@pytest.mark.parametrize("case", TWO_PROCESSES, ids=str)
def test_of_two_trainer_processes(in_two: list[dict[str, Any]], case: Case) -> None:
    check_steps(in_two, case)


@pytest.mark.slow
def test_every_student_trainer_and_engine_over_more_steps(tmp_path: Path) -> None:
    found = follow(ALL_OF_TWO, tmp_path, size=2, num_steps=4)
    for case in ALL_OF_TWO:
        check_steps(found, case)


# ---- One engine in two processes -------------------------------------------------------------------------------------


def test_members_pool_what_they_are_asked(shared: list[dict[str, Any]]) -> None:
    """Shares that differ, the same share twice, and a member without any: each gets its own, one sample one answer."""
    first, second = (process["written"] for process in shared)
    for begin in (0, 3):  # with vLLM's draws, with this package's
        apart, same, only_second = zip(first[begin : begin + 3], second[begin : begin + 3], strict=True)
        assert (set(apart[0]), set(apart[1])) == ({0, 2, 4, 6, 8}, {1, 3, 5, 7})
        assert same[0] == same[1] != {}
        assert (set(only_second[0]), set(only_second[1])) == (set(), {0, 1, 2, 3})
        answers = apart[0] | apart[1]
        for other in (*same, *only_second):
            assert all(tokens == answers[number] for number, tokens in other.items())


def test_own_draws_in_two_processes_are_the_native_engines(shared: list[dict[str, Any]]) -> None:
    native = cases.native_answers()
    written = shared[0]["written"][3] | shared[1]["written"][3]
    assert written == native


def test_a_byte_that_changed_on_its_way_to_one_member_stops_both(shared: list[dict[str, Any]]) -> None:
    for process in shared:
        told, refused = process["damage"]["errors"]
        assert told.startswith("VerificationError: 1 tensors, 'model.embed_tokens.weight' among them, came to rank 1")
        assert "incomplete weight update" in refused
        assert process["damage"]["healed"]
