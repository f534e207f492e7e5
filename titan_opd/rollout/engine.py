"""What every rollout engine offers, and what it can be asked to record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from titan_opd.config.schema import SamplingConfig
from titan_opd.data.records import Sample, Trajectory


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

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take all weights of policy version `version`, in place, or raise an error that says which were wrong.

        Args:
            named_tensors: Hugging Face names and tensors, each parameter exactly once.
            version: the version that these weights are; not below `policy_version`.
        """


def check_version(current: int, new: int) -> None:
    """Raise a ValueError when a policy version would fall."""
    if new < current:
        raise ValueError(f"weights of policy version {new} offered to an engine at version {current}; it never falls")
