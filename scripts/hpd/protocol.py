"""What is compared with what, fixed before the first run.

Question. Answers written by the teacher are scarce; its scores are free. What is the best use of both?

Data. `num_answers` arithmetic problems that the student has not seen (they follow the labelled set of its warm start in
the training stream). The teacher answers each once, sampling at temperature 1; answers that do not end are left out,
and the data's own answers to the same problems are the second set.

Methods, each from the same warm-started student, with the same optimizer, batch, number of steps and decay
(train_configs/arithmetic/study_hpd.toml), and so with the same answers in the same order at equal seeds:

    SFT              cross-entropy on the data's answers
    sequence KD      cross-entropy on the teacher's answers
    reverse KL       over the whole vocabulary, at the tokens of the teacher's answers
    JSD              the same, beta = 0.5
    HPD, sampled     hybrid; the student's token is drawn by the engine that reads the answer, once a policy version
    HPD, dense       hybrid; the student's token is drawn in the loss head

Selection. Every method at every rate of `learning_rates` with the seed `selection_seed`; the rate with the highest
greedy exact match on the selection problems is the method's (at equality the lower one). These runs serve for nothing
else.

Report. Every method at its rate with each of `report_seeds`, on the test problems, which no choice has looked at. A
seed sets the order of the answers and the draws; the data, the models that begin and the problems are the same for all.

Measures, at each checkpoint: greedy exact match; exact match at temperature 1; the student's entropy in nats a token,
as the mean of -log p over what it samples at temperature 1 (over the first `num_sampled` problems, as is the exact
match at temperature 1).

If SFT at its rate is below 10 % or above 90 %, the size does not tell methods apart: `num_answers` is changed, for all
methods, and everything is run anew.
"""

from __future__ import annotations

from dataclasses import dataclass

CONFIG = "train_configs/arithmetic/study_hpd.toml"
TEACHER_ANSWERS, DATA_ANSWERS = "teacher_answers.jsonl", "data_answers.jsonl"


@dataclass(frozen=True)
class Method:
    """What a method changes of `CONFIG`.

    Attributes:
        answers: the file of prompts and answers that it learns from.
        options: overrides of the configuration.
    """

    answers: str
    options: tuple[str, ...]


_CROSS_ENTROPY = ("--objective.kind", "cross_entropy", "--teacher.engine", "none")
METHODS = {
    "SFT": Method(DATA_ANSWERS, _CROSS_ENTROPY),
    "sequence KD": Method(TEACHER_ANSWERS, _CROSS_ENTROPY),
    "reverse KL": Method(TEACHER_ANSWERS, ("--objective.kind", "reverse_kl", "--objective.support", "dense")),
    "JSD": Method(TEACHER_ANSWERS, ("--objective.kind", "jsd", "--objective.support", "dense")),
    "HPD, sampled": Method(TEACHER_ANSWERS, ("--objective.kind", "hybrid", "--objective.support", "sampled")),
    "HPD, dense": Method(TEACHER_ANSWERS, ("--objective.kind", "hybrid", "--objective.support", "dense")),
}


@dataclass(frozen=True)
class Protocol:
    """The study's numbers."""

    num_answers: int = 300
    skip_train: int = 200  # the warm start's labelled set, train_configs/arithmetic/warm_start.toml
    learning_rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    selection_seed: int = 0
    report_seeds: tuple[int, ...] = (1, 2, 3)
    num_selection: int = 200
    num_test: int = 300
    num_sampled: int = 100
    steps: int = 200
    checkpoint_every: int = 50
    batch: int = 64


SMOKE = Protocol(
    num_answers=30,
    learning_rates=(1e-3, 2e-3),
    report_seeds=(1, 2),
    num_selection=4,
    num_test=6,
    num_sampled=4,
    steps=3,
    checkpoint_every=2,
    batch=8,
)


@dataclass(frozen=True)
class Job:
    """One run: a method, a learning rate, a seed."""

    method: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        method = self.method.lower().replace(",", "").replace(" ", "-")
        return f"{method}_{self.learning_rate:g}_{self.seed}"


def selection_jobs(protocol: Protocol) -> list[Job]:
    """The runs that choose each method's learning rate."""
    return [Job(method, rate, protocol.selection_seed) for method in METHODS for rate in protocol.learning_rates]


def report_jobs(protocol: Protocol, rates: dict[str, float]) -> list[Job]:
    """The runs that are reported, given each method's learning rate."""
    return [Job(method, rates[method], seed) for seed in protocol.report_seeds for method in METHODS]
