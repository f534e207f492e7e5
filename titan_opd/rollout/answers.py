"""`AnswersEngine`: the data's own expert responses in the place of a student's answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from titan_opd.config.schema import SamplingConfig
from titan_opd.data.records import Sample, Trajectory
from titan_opd.rollout.engine import RECORD_NOTHING, Recording, check_version


class AnswersEngine:
    """The engine of `rollout.engine = "answers"`: each prompt is answered by its own `response_ids`.

    Nothing is sampled: the sampler's settings do not apply, and a trajectory has no behaviour log-probabilities.
    """

    def __init__(self) -> None:
        self.policy_version = 0

    def generate(
        self, samples: Sequence[Sample], sampling: SamplingConfig, recording: Recording = RECORD_NOTHING
    ) -> list[Trajectory]:
        """The expert's response to each sample's prompt.

        Raises:
            ValueError: a prompt has no response, or `recording` asks for what only a student's distribution has.
        """
        if recording != RECORD_NOTHING:
            raise ValueError(
                f"{recording} cannot be recorded from an expert's responses, which nobody sampled; "
                "choose rollout.engine = 'native', or an objective that needs no samples of the student"
            )
        return [self._answer(sample) for sample in samples]

    def _answer(self, sample: Sample) -> Trajectory:
        response_ids = sample.prompt.response_ids
        if response_ids is None:
            raise ValueError(
                f"prompt {sample.prompt.id!r} has no response, and rollout.engine = 'answers' needs one for each "
                "prompt; name the data's column with data.response_field, or choose rollout.engine = 'native'"
            )
        versions = torch.full(response_ids.shape, self.policy_version, dtype=torch.int32)
        return Trajectory(sample, response_ids, versions, finish_reason="expert")

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Note the version. There are no weights to take: `named_tensors` is left unread.

        Raises:
            ValueError: `version` is below the present one.
        """
        check_version(self.policy_version, version)
        self.policy_version = version
