"""A run on disk and on the screen, and what is told of it at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from rich.table import Table
from transformers import PreTrainedTokenizerBase

from titan_opd.checkpoint.folder import CHECKPOINTS, atomic_folder, remove_old_checkpoints
from titan_opd.config import Config, dump_toml
from titan_opd.evaluation import EvaluationResult, Evaluator
from titan_opd.models import Decoder, save_checkpoint_files
from titan_opd.observe import Display, MetricsWriter, PhaseClock, PhaseTimes, make_table, phase_table
from titan_opd.parallel import World
from titan_opd.weights import named_weights

CONFIG_FILE = "config.toml"


@dataclass
class RunSummary:
    """The run's evaluations by step and its time by phase."""

    config: Config
    evaluations: dict[int, EvaluationResult] = field(default_factory=dict)
    times: PhaseTimes = field(default_factory=PhaseTimes)

    @property
    def before(self) -> EvaluationResult:
        return self.evaluations[min(self.evaluations)]

    @property
    def after(self) -> EvaluationResult:
        return self.evaluations[max(self.evaluations)]

    def tables(self) -> list[Table]:
        """The final tables: what was learned, and where the time went."""
        return [*([self._evaluation_table()] if self.evaluations else []), phase_table(self.times)]

    def _evaluation_table(self) -> Table:
        names = list(self.before.metrics())
        rows = [
            (f"after step {step}", *(f"{result.metrics()[name]:.4g}" for name in names))
            for step, result in self.evaluations.items()
        ]
        return make_table("Evaluation", ("", *names), rows)


class Run:
    """The folder of one run, its display and its clock: `config.toml`, `metrics.jsonl`, `tensorboard/`, `checkpoints/`.

    Every process has one; the main process's writes and talks, the others' take part in what needs all of them.
    """

    def __init__(self, config: Config, world: World, clock: PhaseClock) -> None:
        self.path = Path(config.run.directory)
        self.summary = RunSummary(config)
        self._config = config
        self._world = world
        self._clock = clock
        self._display: Display | None = None
        self._metrics: MetricsWriter | None = None

    @classmethod
    def create(cls, config: Config, world: World, clock: PhaseClock) -> Run:
        """Claim `run.directory` and write the resolved configuration into it.

        Raises:
            ValueError: another run lives there.
        """
        run = cls(config, world, clock)
        if world.is_main:
            if (run.path / CONFIG_FILE).exists():
                raise ValueError(
                    f"run.directory = {str(run.path)!r} already holds a run; name another folder "
                    "(--run.directory NEW) or delete this one"
                )
            run.path.mkdir(parents=True, exist_ok=True)
            (run.path / CONFIG_FILE).write_text(dump_toml(config))
        return run

    def __enter__(self) -> Run:
        if self._world.is_main:
            self._metrics = MetricsWriter(self.path, tensorboard=self._config.observe.tensorboard)
            self._display = Display(self.path.name, self._config.training.steps, self._config.observe)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.summary.times += self._clock.take()
        if self._display is not None:
            self._display.close()
            self._metrics.close()

    def announce(self, lines: Sequence[str]) -> None:
        """Show lines that stay."""
        if self._display is not None:
            for line in lines:
                self._display.message(line)

    def is_due(self, step: int, every: int) -> bool:
        """Whether something that happens `every` steps (0: only at the end) happens after `step`."""
        return step == self._config.training.steps or (every > 0 and step % every == 0)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and show the metrics of a step, with the time by phase since the last one."""
        times = self._clock.take()
        self.summary.times += times
        if self._display is not None:
            self._metrics.write(step, "train", {**metrics, **times.metrics()})
            self._display.step(step, metrics, times)

    def evaluate(self, step: int, evaluator: Evaluator | None) -> None:
        """Evaluate the student as it is after `step` steps; nothing without evaluation prompts."""
        if evaluator is None:
            return
        with self._clock.phase("evaluate"):
            result = evaluator.run(version=step)
        self.summary.evaluations[step] = result
        if self._display is not None:
            self._metrics.write(step, "evaluation", result.metrics())
            self._display.evaluation(step, result.accuracy, str(result))

    def save(self, step: int, student: Decoder, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write a checkpoint in Hugging Face format, tokenizer included, and delete those beyond `checkpoint.keep`."""
        with self._clock.phase("checkpoint"):
            weights = named_weights(student)
            if not self._world.is_main:
                for _ in weights:  # takes part in the gathering
                    pass
                return
            directory = self.path / CHECKPOINTS
            with atomic_folder(directory / f"step-{step:06d}") as folder:
                save_checkpoint_files(weights, student.config, folder)
                tokenizer.save_pretrained(folder)
            remove_old_checkpoints(directory, self._config.checkpoint.keep)
