"""Statistics of gradients that were drawn several times: unbiased estimates with jackknife errors.

A squared length of a mean is too large by the variance over the number of draws, so that noise alone would look like a
bias; the estimates here take that off, and can therefore come out below 0.

Shape suffixes: R independent draws, B numbers of a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """A number and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        """The value to two digits of its error, such as `1.234 ± 0.056`."""
        if not (math.isfinite(self.error) and self.error > 0):
            return f"{self.value:.4g}"
        digits = max(0, 1 - math.floor(math.log10(self.error)))
        return f"{self.value:.{digits}f} ± {self.error:.{digits}f}"

    def __mul__(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, self.error * abs(factor))

    def sigmas_from(self, expected: float) -> float:
        """How many standard errors the value is away from `expected`."""
        return abs(self.value - expected) / self.error if self.error else math.inf * abs(self.value - expected)


def jackknife(statistic: Callable[..., Tensor], *draws: Tensor) -> Estimate:
    """The statistic of all draws, and its standard error from leaving out one draw after the other.

    Args:
        statistic: of tensors [R, ...] to a scalar.
        draws: [R, ...] each; row r of all of them belongs to the same draw. At least 3.
    """
    num_draws = len(draws[0])
    assert num_draws >= 3, "leaving one draw out must leave two, of which a variance can be taken"
    kept = ~torch.eye(num_draws, dtype=torch.bool)
    without_R = torch.stack([statistic(*(values[row] for values in draws)) for row in kept])
    variance = (num_draws - 1) / num_draws * (without_R - without_R.mean()).square().sum()
    return Estimate(float(statistic(*draws)), float(variance.sqrt()))


def squared_norm_of_mean(gradients_RB: Tensor) -> Tensor:
    """Scalar, an unbiased estimate of ‖E g‖²: the mean product of two different draws."""
    num_draws = len(gradients_RB)
    all_pairs = gradients_RB.sum(0).square().sum()
    return (all_pairs - gradients_RB.square().sum()) / (num_draws * (num_draws - 1))


def total_variance(gradients_RB: Tensor) -> Tensor:
    """Scalar, an unbiased estimate of E‖g - E g‖², the trace of the covariance."""
    return (gradients_RB - gradients_RB.mean(0)).square().sum() / (len(gradients_RB) - 1)


def relative_distance(differences_RB: Tensor, gradients_RB: Tensor) -> Estimate:
    """‖E d‖ / ‖E g‖, where row r of both comes from the same draw.

    A square that comes out below 0 counts as 0. The error is half the way down to the root of the square's two-sigma
    lower end; where that end is below 0 the distance cannot be told from 0, and the error is the root of the square's
    upper end, which is no smaller than the value.
    """
    square = jackknife(
        lambda d_RB, g_RB: squared_norm_of_mean(d_RB) / squared_norm_of_mean(g_RB), differences_RB, gradients_RB
    )
    value, lower_end = math.sqrt(max(square.value, 0)), square.value - 2 * square.error
    if lower_end > 0:
        return Estimate(value, (value - math.sqrt(lower_end)) / 2)
    return Estimate(value, math.sqrt(value**2 + square.error))


def relative_deviation(gradients_RB: Tensor, reference_RB: Tensor) -> Estimate:
    """The root of E‖g - E g‖² over ‖E r‖, where row r of both comes from the same draw."""
    return jackknife(
        lambda g_RB, r_RB: (total_variance(g_RB) / squared_norm_of_mean(r_RB)).clamp(min=0).sqrt(),
        gradients_RB,
        reference_RB,
    )


def variance_error(num_draws: int, *, covariance_square: float, fourth_cumulant: float) -> float:
    """The exact standard error of `total_variance`.

    For scalars it is the root of kappa_4 / R + 2 sigma^4 / (R - 1); estimating it from the same draws would miss the
    rare large ones that heavy tails are made of.

    Args:
        num_draws: R.
        covariance_square: the covariance's squared Frobenius norm.
        fourth_cumulant: E‖x‖⁴ - (E‖x‖²)² - 2 covariance_square, x = g - E g; adds up over independent summands.
    """
    return math.sqrt(fourth_cumulant / num_draws + 2 * covariance_square / (num_draws - 1))
