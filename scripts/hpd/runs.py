"""The study's runs: data, training, what is measured of each checkpoint, and the file of finished runs."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import study_jobs
import torch
from study_jobs import claim_folder, read_rows

from titan_opd.checkpoint import checkpoint_steps
from titan_opd.config import SamplingConfig, load_config
from titan_opd.config.schema import ArithmeticConfig, RolloutConfig
from titan_opd.data import Prompt, load_tokenizer, num_tokens, stop_ids
from titan_opd.data.arithmetic import arithmetic_prompts, worked_sum
from titan_opd.evaluation import GRADERS, EvaluationResult, evaluate
from titan_opd.models import load_decoder
from titan_opd.rollout import NativeEngine
from titan_opd.train import train
from titan_opd.write_answers import write_answers

from .protocol import CONFIG, DATA_ANSWERS, METHODS, TEACHER_ANSWERS, Job, Protocol

RESULTS = "results.jsonl"
_MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class Study:
    """Where the study is and what it starts from.

    Attributes:
        output: its folder.
        teacher, student: folders of models.
        protocol: its numbers.
    """

    output: Path
    teacher: Path
    student: Path
    protocol: Protocol

    @property
    def problems(self) -> ArithmeticConfig:
        protocol = self.protocol
        return ArithmeticConfig(
            num_train=protocol.num_answers,
            skip_train=protocol.skip_train,
            num_eval=protocol.num_selection + protocol.num_test,
        )

    def held_out(self) -> tuple[list[Prompt], list[Prompt]]:
        """The selection problems and the test problems."""
        _, prompts = arithmetic_prompts(self.problems)
        return prompts[: self.protocol.num_selection], prompts[self.protocol.num_selection :]


def prepare(study: Study) -> None:
    """Claim the folder and write both sets of answers, unless they are there.

    Raises:
        ValueError: the folder holds a study of other models or another protocol.
    """
    claim_folder(
        study.output,
        {"teacher": str(study.teacher), "student": str(study.student), "protocol": asdict(study.protocol)},
    )
    if not (study.output / TEACHER_ANSWERS).exists():
        problems = study.problems
        options = ["--teacher.path", study.teacher, "--data.task", "arithmetic", "--data.train", ""]
        options += ["--data.arithmetic.num_train", problems.num_train]
        options += ["--data.arithmetic.skip_train", problems.skip_train]
        config = load_config(CONFIG, [str(option) for option in options])
        write_answers(config, study.output / TEACHER_ANSWERS, model="teacher")
    lines = []
    for row in read_rows(study.output / TEACHER_ANSWERS):
        first, second = map(int, row["prompt"].removesuffix("=").split("+"))
        lines.append(json.dumps({**row, "response": worked_sum(first, second), "sampler": None}) + "\n")
    (study.output / DATA_ANSWERS).write_text("".join(lines))


def run_jobs(study: Study, jobs: Iterable[Job], processes: int) -> dict[Job, dict[str, Any]]:
    """The records of all jobs, from `RESULTS` or, where they are not there yet, from runs that are added to it."""
    wanted = list(jobs)
    records = study_jobs.run_jobs(
        study.output / RESULTS,
        wanted,
        processes,
        run=partial(run_job, study),
        job_of=lambda row: Job(row["method"], row["learning_rate"], row["seed"]),
        tell=lambda job, row: f"{job.name}: exact match {row['curve'][-1]['exact_match']:.1%}, {row['seconds']:.0f} s",
    )
    return {job: records[job] for job in wanted}


def run_job(study: Study, job: Job) -> dict[str, Any]:
    """Train one run and measure its checkpoints; its folder is gone afterwards."""
    directory = study.output / "runs" / job.name
    shutil.rmtree(directory, ignore_errors=True)  # of a run that was interrupted
    method, protocol = METHODS[job.method], study.protocol
    options = {
        "run.directory": directory,
        "run.seed": job.seed,
        "run.threads": 1,
        "student.path": study.student,
        "teacher.path": study.teacher,
        "data.train": study.output / method.answers,
        "optimizer.learning_rate": job.learning_rate,
        "training.steps": protocol.steps,
        "checkpoint.every": protocol.checkpoint_every,
        "schedule.batch": protocol.batch,
    }
    overrides = [f"--{name}={value}" for name, value in options.items()]
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        train(load_config(CONFIG, [*overrides, *method.options]))
    seconds = time.perf_counter() - start
    selection, test = study.held_out()
    checkpoints = checkpoint_steps(directory)
    curve = [{"step": step, **measure(folder, test, protocol)} for step, folder in checkpoints.items()]
    final = checkpoints[protocol.steps]
    record = {**asdict(job), "selection": answer(final, selection, temperature=0.0).accuracy, "curve": curve}
    shutil.rmtree(directory)
    return {**record, "seconds": seconds}


def measure(folder: Path, test: list[Prompt], protocol: Protocol) -> dict[str, float]:
    """The protocol's measures of the model in `folder`."""
    sampled = answer(folder, test[: protocol.num_sampled], temperature=1.0)
    logprobs = torch.cat([one.trajectory.behavior_logprobs for one in sampled.answers])
    return {
        "exact_match": answer(folder, test, temperature=0.0).accuracy,
        "exact_match_sampled": sampled.accuracy,
        "entropy": -logprobs.mean().item(),
    }


def answer(folder: Path, prompts: list[Prompt], *, temperature: float) -> EvaluationResult:
    """The graded answers of the model in `folder`."""
    tokenizer, decoder = load_tokenizer(str(folder)), load_decoder(folder)
    engine = NativeEngine(
        decoder.requires_grad_(False),
        config=RolloutConfig(max_concurrent=200),
        stop_ids=stop_ids(tokenizer, decoder.config.eos_token_ids),
        vocab_size=num_tokens(tokenizer),
        max_prompt_tokens=16,
        seed=0,
    )
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=_MAX_NEW_TOKENS)
    return evaluate(engine, prompts, sampling, GRADERS["exact"], tokenizer)
