"""What `[weights]` refuses."""

import pytest

from tests.unit.config.test_load import SMALLEST, load

WORKERS = "[rollout]\nplacement = 'workers'\n[schedule]\nmode = 'async'\n"


def test_changes_are_for_workers(tmp_path):
    assert not load(tmp_path, SMALLEST).weights.delta
    assert load(tmp_path, SMALLEST + WORKERS + "[weights]\ndelta = true\n").weights.delta


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[weights]\ndelta = true\n", "with rollout.placement = 'colocated' the engine reads the trainer's own memory"),
        (WORKERS + "[weights]\ndelta = true\ntransport = 'cuda_ipc'\n", "with weights.transport = 'cuda_ipc' the engi"),
        (WORKERS + "[weights]\ndelta = true\nverify = 'probe'\n", "weights.verify = 'probe' makes none"),
        (WORKERS + "[weights]\ndelta = true\nverify = 'none'\n", "weights.verify = 'none' makes none"),
    ],
)
def test_changes_where_they_save_or_prove_nothing_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, SMALLEST + text)
