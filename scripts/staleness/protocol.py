"""What is compared with what, fixed before the first run that counts.

Question. AsyncOPD (arXiv 2606.24143) reports that the forward KL on the teacher's tokens learns as well from stale
answers as from fresh ones, and that the policy gradient needs the learner's advantage (log q - log p with the current
student) rather than the rollout's (with the policy that wrote the sample). Is it so on the demo's sums?

Staleness s is exact: the answers of step w are written by the policy of version max(0, w - s), whole, and trained once.
No clock and no worker is involved. Everything else is train_configs/arithmetic/distill.toml, with fewer answers a step
and sums of two digits, whose answers are short.

Methods, from the same warm-started student towards the same teacher:

    forward KL          teacher's top 8, bucket: nothing of it is of the stale policy but the prefixes
    rollout, m = 1, 64  policy gradient on m samples of the stale policy a token, importance weights, its advantage
    learner, m = 1, 64  the same with the current student's advantage

Without staleness both advantages are the same number: at s = 0 one run stands for both.

Selection. The forward KL and the policy gradient each get one learning rate for all m, advantages and s. Every rate of
`learning_rates` is run with the seed `selection_seed` at s = `selection_staleness`, the middle of what is compared: the
forward KL, and the policy gradient with m = 64 and either advantage. The rate with the highest mean of greedy exact
match on the selection problems (at equality the lower one) is taken. These runs serve for nothing else.

What pilots settled, before any run that is reported: two digits and 80 steps, so that the forward KL gets far from both
ends of the scale at s = 0; rates down to 1e-4, since the policy gradient was at 0 % at s = 4 with 5e-4.

Report. Every method and s with each of `report_seeds`, on the test problems, which no choice has looked at. A seed
sets the order of the training problems and the draws; models and problems are the same for all.

Verdicts. A deviation over seeds is pooled over the staleness values of a method. A difference of two cells counts when
it is above twice its standard error. "Flat": no s differs from s = 0 by as much, and the error is at most
`flat_error` points, so that a loss that matters would have been seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan_opd.config.objective import Objective

CONFIG = "train_configs/arithmetic/distill.toml"
FORWARD_KL, POLICY_GRADIENT = "forward KL", "policy gradient"
SAMPLES_M = (1, 64)
ADVANTAGES = ("rollout", "learner")


@dataclass(frozen=True)
class Method:
    """What a method changes of `CONFIG`.

    Attributes:
        advantage: of the policy gradient; None for the forward KL.
        num_samples: m.
    """

    advantage: str | None = None
    num_samples: int = 1

    @property
    def family(self) -> str:
        """What it shares its learning rate with."""
        return FORWARD_KL if self.advantage is None else POLICY_GRADIENT

    @property
    def objective(self) -> Objective:
        if self.advantage is None:
            return Objective("forward_kl", support="teacher_topk", tail="bucket")
        return Objective("policy_gradient", advantage=self.advantage, correction="importance")


METHODS = {FORWARD_KL: Method()} | {
    f"{advantage}, m = {m}": Method(advantage, m) for m in SAMPLES_M for advantage in ADVANTAGES
}


@dataclass(frozen=True)
class Protocol:
    """The study's numbers."""

    learning_rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    selection_staleness: int = 4
    selection_seed: int = 0
    report_seeds: tuple[int, ...] = (1, 2, 3)
    staleness: tuple[int, ...] = (0, 1, 4, 16)
    num_selection: int = 100
    num_test: int = 150
    steps: int = 80
    batch: int = 32
    warmup_steps: int = 8
    flat_error: float = 5.0


SMOKE = Protocol(
    learning_rates=(1e-3, 2e-3),
    selection_staleness=1,
    report_seeds=(1, 2),
    staleness=(0, 2),
    num_selection=4,
    num_test=6,
    steps=4,
    batch=4,
    warmup_steps=1,
)


@dataclass(frozen=True)
class Job:
    """One run: a method, a staleness, a learning rate, a seed."""

    method: str
    staleness: int
    learning_rate: float
    seed: int

    @property
    def runs_as(self) -> Job:
        """The job whose run gives this one's numbers: at s = 0 the advantages agree."""
        if self.staleness > 0 or not self.method.startswith("rollout"):
            return self
        return Job(self.method.replace("rollout", "learner"), self.staleness, self.learning_rate, self.seed)


def selection_jobs(protocol: Protocol) -> list[Job]:
    """The runs that choose learning rates."""
    return [
        Job(name, protocol.selection_staleness, rate, protocol.selection_seed)
        for name, method in METHODS.items()
        if method.advantage is None or method.num_samples == max(SAMPLES_M)
        for rate in protocol.learning_rates
    ]


def report_jobs(protocol: Protocol, rates: dict[str, float]) -> list[Job]:
    """The runs that are reported, given each family's learning rate."""
    return [
        Job(name, staleness, rates[method.family], seed)
        for seed in protocol.report_seeds
        for staleness in protocol.staleness
        for name, method in METHODS.items()
    ]
