"""What every rollout engine offers, and what it can be asked to record."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from titan_opd.config.schema import SamplingConfig
from titan_opd.data.records import Sample, Trajectory
from titan_opd.rollout.update import NamedTensors


@dataclass(frozen=True)
class Recording:
    """What an engine writes down at each position beside the token and its log-probability.

    Attributes:
        num_samples: m, Monte Carlo samples a token, the written token among them as column 0 (where an expert's answer
            is read: the expert's token); 0 records none.
        top_k: K, the student's most likely tokens with log-probabilities normalised over the whole vocabulary at the
            sampling temperature; 0 records none.
    """

    num_samples: int = 0
    top_k: int = 0


RECORD_NOTHING = Recording()


class RolloutEngine(Protocol):
    """Writes answers with the newest weights it was given.

    `policy_version` is the version of the weights that write the next token; it never falls.
    """

    policy_version: int

    def generate(
        self, samples: Sequence[Sample], sampling: SamplingConfig, recording: Recording = RECORD_NOTHING
    ) -> list[Trajectory]:
        """One answer for each sample, in the order of `samples`."""

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Take all weights of policy version `version`, in place, or raise an error that says which were wrong.

        Args:
            named_tensors: Hugging Face names and tensors, each parameter exactly once.
            version: the version that these weights are; not below `policy_version`.
        """


class StreamingEngine(RolloutEngine, Protocol):
    """Also writes step by step, so that the caller can add samples, drop samples and change the weights in between.

        engine.submit(samples, sampling, recording)
        while engine.num_running or engine.num_waiting:
            for trajectory in engine.step(): ...            # as answers end
            if ...: engine.load_weights(weights, version)   # between two steps: the next token has the new version

    Every token's `Trajectory.policy_versions` is the version whose weights computed its logits.
    """

    @property
    def is_serving(self) -> bool:
        """False after an update that broke off half-way, until a complete one: it writes nothing then."""

    @property
    def num_running(self) -> int:
        """Sequences that a step writes a token to."""

    @property
    def num_waiting(self) -> int:
        """Submitted samples that have no row yet."""

    @property
    def free_capacity(self) -> int:
        """Samples that can be submitted before one has to wait because all rows are taken."""

    def submit(
        self, samples: Sequence[Sample], sampling: SamplingConfig, recording: Recording = RECORD_NOTHING
    ) -> None:
        """Let samples join the running sequences as rows become free.

        Args:
            samples: their numbers differ from those that run or wait.
            sampling, recording: those of everything that runs or waits; others when nothing does.
        """

    def step(self) -> list[Trajectory]:
        """Write one token to every running sequence; the answers that ended with it, in no particular order."""

    def cancel(self, numbers: Collection[int]) -> list[Sample]:
        """Drop samples without a trajectory, and free their rows.

        Args:
            numbers: sample numbers; those of samples that neither run nor wait, perhaps ended already, are passed over.

        Returns:
            The samples that were dropped, to be submitted anew or given back.
        """


def check_version(current: int, new: int) -> None:
    """Raise a ValueError when a policy version would fall."""
    if new < current:
        raise ValueError(f"weights of policy version {new} offered to an engine at version {current}; it never falls")
