"""The learner: the student, its optimizer, and the step that changes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from titan_opd.config.objective import Objective
from titan_opd.config.schema import OptimizerConfig
from titan_opd.data.records import PackedBatch
from titan_opd.losses import DistillationOutput, distillation_loss
from titan_opd.models import Decoder, PackedAttention
from titan_opd.optimizer import build_optimizer, clip_gradients, learning_rate


class DistillationModel(nn.Module):
    """The student with its loss on top: packed tokens in, loss out. No logits leave it."""

    def __init__(self, decoder: Decoder, objective: Objective, *, vocab_size: int, logits_chunk_mb: float) -> None:
        super().__init__()
        self.decoder = decoder
        self.objective = objective
        self.vocab_size = vocab_size
        self.logits_chunk_mb = logits_chunk_mb

    def forward(self, batch: PackedBatch, *, num_tokens: int, current_version: int) -> DistillationOutput:
        """The loss of one micro-batch, over the `num_tokens` trained tokens of the whole optimizer step."""
        attention = PackedAttention(batch.cu_seqlens, batch.max_seqlen)
        hidden_TH = self.decoder(batch.input_ids, batch.positions, attention)
        return distillation_loss(
            hidden_TH[batch.loss_positions],
            self.decoder.lm_head_weight,
            self.objective,
            batch.scores,
            batch.token_weights,
            num_tokens=num_tokens,
            policy_versions=batch.policy_versions,
            current_version=current_version,
            vocab_size=self.vocab_size,
            logits_chunk_mb=self.logits_chunk_mb,
        )


class Learner:
    """Takes optimizer steps on packed batches.

    Args:
        decoder: the student; trained in place.
        objective: what is minimised.
        config: the optimizer's settings.
        num_steps: optimizer steps of the whole run, for the learning-rate schedule.
        vocab_size: tokens of the tokenizer; rows of the vocabulary at or above it have no probability.
        logits_chunk_mb: memory of one chunk of logits in the loss head, MiB.
    """

    def __init__(
        self,
        decoder: Decoder,
        objective: Objective,
        config: OptimizerConfig,
        *,
        num_steps: int,
        vocab_size: int,
        logits_chunk_mb: float,
    ) -> None:
        self.decoder = decoder
        self.model = DistillationModel(decoder, objective, vocab_size=vocab_size, logits_chunk_mb=logits_chunk_mb)
        self.optimizer = build_optimizer(self.model.parameters(), config)
        self.config = config
        self.num_steps = num_steps
        self.steps_taken = 0

    def step(self, batches: Sequence[PackedBatch], *, current_version: int) -> dict[str, float]:
        """One optimizer step on the sum of the micro-batches' gradients.

        Every token counts the same, whichever micro-batch it is in: each micro-batch's loss is divided by the trained
        tokens of all of them.

        Returns:
            `loss`, `grad_norm`, `learning_rate`, `tokens` and the loss's metrics, averaged over trained tokens.
        """
        counts = [int(torch.count_nonzero(batch.token_weights)) for batch in batches]
        num_tokens = sum(counts)
        rate = learning_rate(self.steps_taken, self.num_steps, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

        outputs = []
        for batch in batches:
            output = self.model(batch, num_tokens=num_tokens, current_version=current_version)
            output.loss.backward()
            outputs.append(output)
        grad_norm = clip_gradients(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_taken += 1

        metrics = average_metrics([output.metrics for output in outputs], counts)
        loss = sum(output.loss.item() for output in outputs)
        step_metrics = {"loss": loss, "grad_norm": grad_norm.item(), "learning_rate": rate, "tokens": num_tokens}
        return step_metrics | metrics


def average_metrics(metrics: Sequence[dict[str, Tensor]], counts: Sequence[int]) -> dict[str, float]:
    """Means over tokens from the means of micro-batches with `counts` tokens; names that end in "max": the largest."""
    total = max(1, sum(counts))
    combined = {}
    for name in metrics[0]:
        values = [float(micro[name]) for micro, count in zip(metrics, counts, strict=True) if count]
        weights = [count for count in counts if count]
        if name.endswith("max"):
            combined[name] = max(values, default=0.0)
        else:
            combined[name] = sum(value * weight for value, weight in zip(values, weights, strict=True)) / total
    return combined
