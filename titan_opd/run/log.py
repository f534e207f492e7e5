"""What is written and shown of a run while it goes on: its journal, its metrics, its display."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from titan_opd.checkpoint import remove_remains, write_file
from titan_opd.config import Config, dump_toml
from titan_opd.errors import writing
from titan_opd.evaluation import EvaluationResult
from titan_opd.observe import Display, MetricsWriter, PhaseTimes, read_metrics
from titan_opd.run.folder import CONFIG_FILE, Start, check_start
from titan_opd.schedule import JOURNAL_FILE, Journal, TrainedSample


class RunLog:
    """The run's folder and the terminal, in the main process; `Run` makes no call in the others.

    Args:
        path: the run's folder.
        config: the run's, which is written there when it is new.
    """

    def __init__(self, path: Path, config: Config) -> None:
        self._path = path
        self._config = config
        self._journal: Journal | None = None
        self._metrics: MetricsWriter | None = None
        self._display: Display | None = None

    def open(self, start: Start, state: Mapping[str, Any]) -> dict[int, dict[str, float]]:
        """Claim the folder and open the logs where a checkpoint left them.

        Args:
            start: where the run begins.
            state: `journal_bytes` and `metrics_bytes`, the lengths of the logs there.

        Returns:
            The metrics of the evaluations up to there, by step.

        Raises:
            ValueError: another process writes to the run or has done so since `start` was found, or a log was changed
                since the checkpoint.
            StorageError: something cannot be written.
        """
        path = self._path
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        check_start(self._config, start)
        # First, because it locks the file: a process of this run that is still going on must not lose its own.
        self._journal = Journal(path / JOURNAL_FILE, keep_bytes=state["journal_bytes"])
        remove_remains(path)
        if start.checkpoint is None:
            shutil.rmtree(path / "tensorboard", ignore_errors=True)  # of a start that reached no checkpoint
        if not (path / CONFIG_FILE).exists():
            with writing(path):
                write_file(path / CONFIG_FILE, dump_toml(self._config))
        self._metrics = MetricsWriter(
            path,
            tensorboard=self._config.observe.tensorboard,
            keep_bytes=state["metrics_bytes"],
            resumed_step=None if start.checkpoint is None else start.step,
        )
        self._display = Display(path.name, self._config.training.steps, self._config.observe)
        hidden = ("step", "kind", "time")
        return {
            record["step"]: {name: value for name, value in record.items() if name not in hidden}
            for record in read_metrics(path, "evaluation")
        }

    def say(self, lines: Iterable[str]) -> None:
        """Lines on the terminal."""
        for line in lines:
            self._display.message(line)

    def step(
        self, step: int, trained: Sequence[TrainedSample], metrics: Mapping[str, float], times: PhaseTimes
    ) -> None:
        """Step `step`, counted from 1, is done.

        Args:
            step: its number, which is the policy version that it made.
            trained: the samples of all processes.
            metrics: what was measured in it.
            times: where its time went.
        """
        self._journal.append(step, step - 1, trained)
        self._metrics.write(step, "train", {**metrics, **times.metrics()})
        self._display.step(step, metrics, times)

    def evaluation(self, step: int, result: EvaluationResult) -> None:
        """The student after `step` steps has been evaluated."""
        self._metrics.write(step, "evaluation", result.metrics())
        self._display.evaluation(step, result.accuracy, str(result))

    def sync(self) -> dict[str, int]:
        """Bring the logs onto the disk; returns their lengths, which `open` takes back."""
        return {"metrics_bytes": self._metrics.sync(), "journal_bytes": self._journal.sync()}

    def close(self, *, failed: bool) -> None:
        """Close what is open.

        On a full disk closing fails too: of a run that has `failed` that is passed over, for what failed first is what
        the person must read.
        """
        if self._display is not None:
            self._display.close()
        with suppress(OSError) if failed else nullcontext():
            if self._metrics is not None:
                self._metrics.close(failed=failed)
        with suppress(OSError) if failed else nullcontext():
            if self._journal is not None:
                self._journal.close()
