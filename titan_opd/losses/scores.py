"""What the teacher says about each response token.

Shape suffixes: N response tokens, K candidates (or m samples) a token, M tokens kept by truncated sampling,
V vocabulary, H_t the teacher's hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor


@dataclass(frozen=True, eq=False)
class TeacherScores:
    """Scores with one row per response token; every field is optional, the objective says what it needs.

    Attributes:
        ids: [N, K] int, candidate tokens.
        logprobs: [N, K], the teacher's log-probability of each id, normalised over the whole vocabulary, at the
            objective's temperature.
        tail_logprobs: [N], log of the teacher's mass outside the valid ids, from the full logits. When absent it is
            derived as log(1 - sum exp), which is inexact near full coverage.
        behavior_logprobs: [N, K], the rollout policy's log-probability of each id, of the distribution really
            sampled from.
        proximal_logprobs: [N, K], the proximal policy's.
        behavior_support: [N, M] int, the ids that truncated sampling kept, padded with -1.
        valid: [N, K] bool, for ragged K; what stands in the padding never enters the graph, NaN included.
        hidden: [N, H_t], the teacher's hidden states after the final norm, for the dense route.
        lm_head_weight: [V, H_t], the teacher's output projection, for the dense route; under tensor parallelism this
            rank's shard of it.
        labels: [N] int, for cross-entropy; for the dense hybrid, the expert's tokens.
    """

    ids: Tensor | None = None
    logprobs: Tensor | None = None
    tail_logprobs: Tensor | None = None
    behavior_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    behavior_support: Tensor | None = None
    valid: Tensor | None = None
    hidden: Tensor | None = None
    lm_head_weight: Tensor | None = None
    labels: Tensor | None = None

    def __getitem__(self, rows: Tensor | slice) -> TeacherScores:
        """The scores of some rows; `lm_head_weight` has none and is kept whole."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return TeacherScores(
            **{
                name: value if value is None or name == "lm_head_weight" else value[rows]
                for name, value in values.items()
            }
        )
