"""The study's runs: a loop in which every answer is exactly as stale as asked, and the file of finished runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import study_jobs
from study_jobs import claim_folder
from torch import Tensor

from titan_opd.assemble import Parts, assemble, build_engine
from titan_opd.config import Config, load_config
from titan_opd.config.checks import check_config
from titan_opd.data import Prompt, pack
from titan_opd.evaluation import EvaluationResult
from titan_opd.learner import Learner
from titan_opd.parallel import World, open_world
from titan_opd.weights import named_weights

from .protocol import CONFIG, METHODS, Job, Protocol

RESULTS = "results.jsonl"
NUM_TRAIN = 3_500  # of the 3,796 sums of two digits that may be drawn; more than a run uses
MAX_DIGITS = 2
_MEASURED = ("effective_sample_share", "importance_ratio_max", "grad_norm")  # means over the second half of the steps


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

    def config(self, job: Job) -> Config:
        """The settings of a run."""
        method, protocol = METHODS[job.method], self.protocol
        num_problems = protocol.num_selection + protocol.num_test
        options = {
            "run.seed": job.seed,
            "run.threads": 1,
            "student.path": self.student,
            "teacher.path": self.teacher,
            "data.arithmetic.max_digits": MAX_DIGITS,
            "data.arithmetic.num_train": NUM_TRAIN,
            "data.arithmetic.num_eval": num_problems,
            "evaluation.num_prompts": num_problems,
            "optimizer.learning_rate": job.learning_rate,
            "optimizer.warmup_steps": protocol.warmup_steps,
            "training.steps": protocol.steps,
            "schedule.batch": protocol.batch,
        }
        config = load_config(CONFIG, [f"--{name}={value}" for name, value in options.items()])
        rollout = replace(config.rollout, num_samples=method.num_samples)
        config = replace(config, objective=method.objective, rollout=rollout)
        check_config(config)
        return config


def prepare(study: Study) -> None:
    """Claim the folder.

    Raises:
        ValueError: the folder holds a study of other models or another protocol.
    """
    claim_folder(
        study.output,
        {"teacher": str(study.teacher), "student": str(study.student), "protocol": asdict(study.protocol)},
    )


def run_jobs(study: Study, jobs: Iterable[Job], processes: int) -> dict[Job, dict[str, Any]]:
    """The records of all jobs, from `RESULTS` or, where they are not there yet, from runs that are added to it."""
    wanted = list(jobs)
    records = study_jobs.run_jobs(
        study.output / RESULTS,
        [job.runs_as for job in wanted],
        processes,
        run=partial(run_job, study),
        job_of=_job,
        tell=_told,
    )
    return {job: records[job.runs_as] for job in wanted}


def _told(job: Job, record: dict[str, Any]) -> str:
    return (
        f"{job.method}, s = {job.staleness}, rate {job.learning_rate:g}, seed {job.seed}: exact match "
        f"{record['exact_match']:.1%}, {record['seconds']:.0f} s"
    )


def _job(record: dict[str, Any]) -> Job:
    return Job(**{field.name: record[field.name] for field in fields(Job)})


def run_job(study: Study, job: Job) -> dict[str, Any]:
    """Train one run, and measure it at its end.

    Returns:
        The job's fields; greedy `exact_match` and `teacher_kl`, KL(student || teacher) in nats a token, on the
        selection problems for the seed of the selection and on the test problems for the others; the learner's metrics
        as means over the second half of the steps; `seconds`.
    """
    start = time.perf_counter()
    protocol = study.protocol
    config = study.config(job)
    with open_world() as world:
        parts = assemble(config, world)
        steps = train_stale(config, parts, world, job.staleness)
        problems = parts.common.eval_prompts
        selection = job.seed == protocol.selection_seed
        asked = problems[: protocol.num_selection] if selection else problems[protocol.num_selection :]
        result = _evaluate(parts, asked, protocol.steps)
    late = steps[len(steps) // 2 :]
    return {
        **asdict(job),
        "exact_match": result.accuracy,
        "teacher_kl": result.teacher_kl,
        **{name: mean(step[name] for step in late) for name in _MEASURED if name in late[0]},
        "seconds": time.perf_counter() - start,
    }


def train_stale(config: Config, parts: Parts, world: World, staleness: int) -> list[dict[str, float]]:
    """Train the student on answers of the policy `staleness` versions before it; before that many steps, of the first.

    Returns:
        The metrics of each step, and `staleness`, how many versions its answers are behind.

    Raises:
        ValueError: the gradient is not finite.
    """
    learner = Learner(
        parts.model,
        config.objective,
        config.optimizer,
        num_steps=config.training.steps,
        seed=config.run.seed,
        world=world,
    )
    # Of its own: the run's engine, which the evaluator uses, may not go back to an older version.
    engine = build_engine(config, parts.common, world.device)
    kept: deque[dict[str, Tensor]] = deque(maxlen=staleness + 1)  # the weights of the newest versions, oldest first
    metrics = []
    for version in range(config.training.steps):
        kept.append({name: tensor.detach().clone() for name, tensor in named_weights(parts.student)})
        engine.load_weights(kept[0], max(0, version - staleness))
        trajectories = engine.generate(
            parts.prompts.take(config.schedule.batch), config.rollout.sampling, parts.recording
        )
        batches = pack(parts.scorer.score(trajectories), config.training.tokens_per_microbatch)
        oldest = min(int(trajectory.policy_versions.min()) for trajectory in trajectories)
        metrics.append({**learner.step(batches, current_version=version), "staleness": version - oldest})
    return metrics


def measure(study: Study, job: Job) -> dict[str, float]:
    """The test measures of the student before its first step."""
    with open_world() as world:
        parts = assemble(study.config(job), world)
        test = _evaluate(parts, parts.common.eval_prompts[study.protocol.num_selection :], 0)
    return {"exact_match": test.accuracy, "teacher_kl": test.teacher_kl}


def _evaluate(parts: Parts, problems: Sequence[Prompt], version: int) -> EvaluationResult:
    return replace(parts.evaluator, prompts=problems).run(version)
