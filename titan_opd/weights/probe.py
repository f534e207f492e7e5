"""A fixed text whose log-probabilities trainer and engine compare after every update.

Digests say that the right bytes are stored; this says that the engine computes with them what the trainer does: a
stale copy beside the storage, a wrong scale or a swapped layout shows here and nowhere else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titan_opd.config.objective import Objective
from titan_opd.data import Prompt, Sample, Trajectory, pack
from titan_opd.learner import DistillationModel
from titan_opd.parallel import plain_products, reshard
from titan_opd.teacher import LabelScorer
from titan_opd.weights.manifest import Probe

NUM_TOKENS = 32
# Largest mean absolute difference of a token's log-probability, in nats. float32 passes of another order of sums are
# within 1e-5; bfloat16 carries 8 bits, and a logit of 20 is rounded by up to 0.06.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.25}
# What quantised engines may differ by from the trainer, which is not quantised: four times what was measured
# (README.md). The engine's bytes are proved by their digests; this finds a product that is wrong altogether.
QUANTIZED_TOLERANCES = {"none": 0.0, "int8": 0.5, "fp8": 1.5}


def probe_ids(vocab_size: int) -> Tensor:
    """[NUM_TOKENS] tokens from all over the vocabulary, the same in every run."""
    return torch.arange(1, NUM_TOKENS + 1) * 2654435761 % vocab_size


class TrainerProbe:
    """Makes the trainer's side of the comparison.

    Args:
        model: the student with its loss on top, parallelised.
        vocab_size: tokens of the tokenizer.
        engine_dtype: in which the engines compute.
        compute_dtype: in which the trainer does.
        quantization: of the engines' weights, as `rollout.quantization`. The trainer's own pass is not quantised, so
            that the gap says what quantisation does to the policy.
    """

    def __init__(
        self,
        model: DistillationModel,
        *,
        vocab_size: int,
        engine_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        quantization: str = "none",
    ) -> None:
        self._model = model
        self._ids = probe_ids(vocab_size)
        rounding = max(TOLERANCES[engine_dtype], TOLERANCES[compute_dtype])
        self._tolerance = max(rounding, QUANTIZED_TOLERANCES[quantization])

    @torch.no_grad()
    def __call__(self) -> Probe:
        """With the present weights; all processes of the trainer take part.

        Raises:
            ValueError: the student's log-probabilities are not finite.
        """
        sample = Sample(0, 0, 0, Prompt("probe", self._ids[:1]))
        response = self._ids[1:]
        versions = torch.zeros(len(response), dtype=torch.int32)
        trajectory = Trajectory(sample, response, versions, finish_reason="expert")
        (batch,) = pack(LabelScorer().score([trajectory]), len(self._ids))
        weight = self._model.decoder.lm_head_weight
        objective = Objective(kind="cross_entropy")
        with plain_products(self._model.decoder):  # the engine rounds nothing to float8
            output = self._model(batch.to(weight.device), objective, num_tokens=1, current_version=0)
        reshard(self._model)
        if not bool(output.per_token.isfinite().all()):
            raise ValueError(
                "the student's weights give log-probabilities that are not finite: its files are damaged, or training "
                "has diverged; then lower optimizer.learning_rate, and begin again from a checkpoint as student.path"
            )
        return Probe(self._ids.tolist(), (-output.per_token.double()).tolist(), self._tolerance)
