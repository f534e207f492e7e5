"""A run on disk, and what is told of it at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table
from transformers import PreTrainedTokenizerBase

from titan_opd.checkpoint.folder import CHECKPOINTS, atomic_folder, remove_old_checkpoints
from titan_opd.config import Config, dump_toml
from titan_opd.evaluation import EvaluationResult
from titan_opd.models import Decoder, save_decoder
from titan_opd.observe import PhaseTimes, make_table, phase_table


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run: `config.toml`, `metrics.jsonl`, `tensorboard/`, `checkpoints/step-<n>/`."""

    path: Path

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """Claim `run.directory` and write the resolved configuration into it.

        Raises:
            ValueError: another run lives there.
        """
        path = Path(config.run.directory)
        if (path / "config.toml").exists():
            raise ValueError(
                f"run.directory = {str(path)!r} already holds a run; name another folder (--run.directory NEW) or "
                "delete this one"
            )
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.toml").write_text(dump_toml(config))
        return cls(path)

    def save_student(self, step: int, student: Decoder, tokenizer: PreTrainedTokenizerBase, *, keep: int) -> Path:
        """Write a checkpoint in Hugging Face format, tokenizer included, and delete all but the newest `keep`."""
        directory = self.path / CHECKPOINTS
        final = directory / f"step-{step:06d}"
        with atomic_folder(final) as folder:
            save_decoder(student, folder)
            tokenizer.save_pretrained(folder)
        remove_old_checkpoints(directory, keep)
        return final


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
