"""Numbers on disk: one JSON object a line, and TensorBoard event files."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricsWriter:
    """Appends to `metrics.jsonl`, and to TensorBoard event files when asked.

    A line is `{"step": 12, "kind": "train", "time": <Unix seconds>, "<name>": <number>, ...}`; in TensorBoard the same
    number has the tag `<kind>/<name>`. Each line is flushed, so that a killed run keeps what it has measured.
    """

    def __init__(self, directory: Path, *, tensorboard: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / "metrics.jsonl").open("a")
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(directory / "tensorboard"))

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Record `values` of optimizer step or version `step`; texts go to the JSON line only."""
        record = {"step": step, "kind": kind, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(directory: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`, all or those of one kind."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record for record in records if kind is None or record["kind"] == kind]
