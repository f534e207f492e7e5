"""Numbers on disk: one JSON object a line, and TensorBoard event files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_opd.errors import writing
from titan_opd.observe.lines import LineFile, read_lines

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends to `metrics.jsonl`, and to TensorBoard event files when asked.

    A line is `{"step": 12, "kind": "train", "time": <Unix seconds>, "<name>": <number>, ...}`; in TensorBoard the same
    number has the tag `<kind>/<name>`.

    Args:
        directory: the run's folder.
        tensorboard: whether to write event files under `directory`/tensorboard.
        keep_bytes: cut `metrics.jsonl` to this length first, to go on from a checkpoint.
        resumed_step: the checkpoint's step; TensorBoard hides what was written after it.
    """

    def __init__(
        self, directory: Path, *, tensorboard: bool, keep_bytes: int = 0, resumed_step: int | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._board_path = directory / "tensorboard"
        self._lines = LineFile(directory / METRICS_FILE, keep_bytes=keep_bytes)
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purge_step = None if resumed_step is None else resumed_step + 1
            with writing(self._board_path):
                self._board = SummaryWriter(str(self._board_path), purge_step=purge_step)

    def sync(self) -> int:
        """Bring everything onto the disk; returns the bytes of `metrics.jsonl`, which is what a checkpoint notes."""
        if self._board is not None:
            with writing(self._board_path):
                self._board.flush()  # it writes in a thread of its own, which does not survive a kill
        return self._lines.sync()

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Record `values` of optimizer step or version `step`; texts go to the JSON line only."""
        self._lines.write_line({"step": step, "kind": kind, "time": round(time.time(), 3), **values})
        if self._board is None:
            return
        with writing(self._board_path):
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self, *, failed: bool = False) -> None:
        """Close the files.

        When the run has `failed`, TensorBoard's thread is not waited for: it may be what failed, and an interrupt can
        leave a lock of its queue taken for ever. It has written all but the last moment's points by itself.
        """
        self._lines.close()
        if self._board is not None and not failed:
            self._board.close()


def read_metrics(directory: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`, all or those of one kind."""
    return [record for record in read_lines(directory / METRICS_FILE) if kind is None or record["kind"] == kind]
