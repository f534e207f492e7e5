"""How old the trained tokens are, in policy versions.

Shapes: N response tokens; S = max_staleness.
"""

from __future__ import annotations

import torch
from torch import Tensor


def staleness_counts(
    policy_versions_N: Tensor, token_weights_N: Tensor, *, current_version: int, max_staleness: int
) -> Tensor:
    """Trained tokens at each staleness, `current_version` minus the version that wrote the token.

    Counts add up over microbatches, minibatches and processes; `staleness_metrics` makes numbers of the sum.

    Args:
        policy_versions_N: [N] integers.
        token_weights_N: [N]; a token of weight 0 is not trained and not counted.
        current_version: the version that the step starts from.
        max_staleness: the schedule's bound.

    Returns:
        [S + 1] int64, on the device of the versions.

    Raises:
        ValueError: a trained token is newer than the step or older than the bound.
    """
    staleness = current_version - policy_versions_N[token_weights_N != 0].long()
    if len(staleness):
        lowest, highest = int(staleness.min()), int(staleness.max())
        if lowest < 0:
            raise ValueError(
                f"a token of policy version {current_version - lowest} in the step at version {current_version}: the "
                "batch belongs to a later step; resume trainer and schedule from one checkpoint"
            )
        if highest > max_staleness:
            raise ValueError(
                f"a token of policy version {current_version - highest} would be trained by the step at version "
                f"{current_version}, {highest} versions later; schedule.max_staleness = {max_staleness} allows it only "
                "with weight 0"
            )
    return torch.bincount(staleness, minlength=max_staleness + 1)


def staleness_metrics(counts: Tensor) -> dict[str, float]:
    """`staleness/mean`, `staleness/max` and `staleness/share_0` ... `share_S`, the share of the trained tokens at each.

    Args:
        counts: [S + 1] tokens at each staleness. Without any token all numbers are 0.
    """
    tokens = [int(count) for count in counts]
    total = max(sum(tokens), 1)
    shares = {f"staleness/share_{age}": count / total for age, count in enumerate(tokens)}
    return {
        "staleness/mean": sum(age * count for age, count in enumerate(tokens)) / total,
        "staleness/max": float(max((age for age, count in enumerate(tokens) if count), default=0)),
        **shares,
    }
