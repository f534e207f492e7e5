"""`AnswersEngine`: the data's own expert responses in the place of a student's answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from titan_opd.config.schema import SamplingConfig
from titan_opd.data.records import Prompt, Sample, Trajectory
from titan_opd.rollout.engine import RECORD_NOTHING, Recording, check_version
from titan_opd.rollout.native import NativeEngine
from titan_opd.rollout.row_update import RowUpdate
from titan_opd.rollout.update import NamedTensors
from titan_opd.weights.pieces import WeightSpec


def require_response(prompt: Prompt) -> Tensor:
    """The expert's response to a prompt, [N] int64; a ValueError where there is none."""
    if prompt.response_ids is None:
        raise ValueError(
            f"prompt {prompt.id!r} has no response, and rollout.engine = 'answers' needs one for each prompt; name "
            "the data's column with data.response_field, or choose rollout.engine = 'native' or 'vllm'"
        )
    return prompt.response_ids


class AnswersEngine:
    """The engine of `rollout.engine = "answers"`: each prompt is answered by its own `response_ids`.

    No answer is sampled. Where an objective needs the student's view of the expert's answer (what it would have written
    at each token, its most likely tokens), an engine with the student's weights reads the answer.

    Args:
        reader: reads the answers; None where nothing is recorded.
    """

    def __init__(self, reader: NativeEngine | None = None) -> None:
        self.policy_version = 0 if reader is None else reader.policy_version
        self._reader = reader

    def generate(
        self, samples: Sequence[Sample], sampling: SamplingConfig, recording: Recording = RECORD_NOTHING
    ) -> list[Trajectory]:
        """The expert's response to each sample's prompt, read by the student when something is to be recorded.

        Raises:
            ValueError: a prompt has no response, or `recording` asks for the student's view and there is no reader.
        """
        answers = [self._answer(sample) for sample in samples]
        if recording == RECORD_NOTHING:
            return answers
        if self._reader is None:
            raise ValueError(
                f"{recording} cannot be recorded from an expert's responses without an engine that reads them; pass "
                "AnswersEngine a reader"
            )
        return self._reader.read(answers, sampling, recording)

    def _answer(self, sample: Sample) -> Trajectory:
        response_ids = require_response(sample.prompt)
        versions = torch.full(response_ids.shape, self.policy_version, dtype=torch.int32)
        return Trajectory(sample, response_ids, versions, finish_reason="expert")

    @property
    def takes_rows(self) -> bool:
        """As the reader."""
        return self._reader is not None and self._reader.takes_rows

    def weight_specs(self) -> dict[str, WeightSpec]:
        """What a complete update consists of: nothing without a reader."""
        return {} if self._reader is None else self._reader.weight_specs()

    @contextmanager
    def update_weights(self, version: int) -> Iterator[RowUpdate]:
        """Put weights into the reader; see `titan_opd.weights.target.WeightTarget`."""
        check_version(self.policy_version, version)
        if self._reader is None:
            raise ValueError("an AnswersEngine without a reader has no weights; note the version by `load_weights`")
        with self._reader.update_weights(version) as update:
            yield update
        self.policy_version = version

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Hand the weights to the reader; without one note the version and leave `named_tensors` unread.

        Raises:
            ValueError: `version` is below the present one, or the weights do not fit the reader.
        """
        check_version(self.policy_version, version)
        if self._reader is not None:
            self._reader.load_weights(named_tensors, version)
        self.policy_version = version
