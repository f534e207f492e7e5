"""A collective that hangs, in real processes: what the report says of it."""

from __future__ import annotations

import pytest

from tests.unit.observe import children
from titan_opd.observe.flight_recorder import describe_collectives, set_up_flight_recorder

LONGEST = 120  # seconds until a test gives up


def test_recording_is_on_and_its_file_is_in_the_runs_folder(tmp_path):
    environment = {"PATH": "/bin"}
    expected = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/run/flight_recorder_nccl_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
    }
    assert set_up_flight_recorder(tmp_path / "run", environment) == expected
    assert environment == {"PATH": "/bin", **expected}


@pytest.mark.parametrize(
    ("given", "new"),
    [
        ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
        ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_ENABLE_MONITORING"),
    ],
)
def test_what_the_person_has_set_stays_by_its_new_name_and_its_old_one(tmp_path, given, new):
    environment = {given: "mine"}
    added = set_up_flight_recorder(tmp_path, environment)
    assert environment[given] == "mine"
    assert new not in added
    assert len(added) == 3


def test_without_a_process_group_there_is_nothing_to_tell():
    assert describe_collectives() == ""


def test_a_collective_that_one_process_does_not_come_to(tmp_path):
    """The report names the collective that waits, and has the stacks of those that wait and of the others."""
    log = tmp_path / "log.txt"
    processes = [children.start(children.miss_a_collective, tmp_path, rank, log) for rank in range(2)]
    try:
        processes[0].join(LONGEST)
        assert processes[0].exitcode == 1, log.read_text()  # the watchdog's end of a process that does not react
    finally:
        for process in processes:
            process.kill()
            process.join()
    report = (tmp_path / "watchdog.txt").read_text()
    others, own = report.split("Collectives of this process\n")
    own_stacks, absent = others.split("Stacks of trainer-1-")
    assert "in miss_a_collective" in own_stacks
    assert "in somewhere_else" in absent
    assert "the last collective is gloo:all_reduce, number 1, ['Float'] [[3]]\n  and it is done" in absent
    assert "the last collective is gloo:all_gather, number 2, ['Double'] [[5]]" in own
    assert "s: gloo:all_gather, number 2, ['Double'] [[5]]" in own.split("  not done after ")[1]
