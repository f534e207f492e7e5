"""Gradients of objectives at given prefixes: in the next token's logits, and from there in all parameters.

At given prefixes every gradient is linear in the gradient in the logits [N, V]. That one comes from `distillation_loss`
itself, which gets the logits as hidden states and the identity as output projection. A count sketch (Charikar, Chen and
Farach-Colton, ICALP 2002) of the parameters' gradient to B numbers keeps lengths and angles up to a relative error of
about sqrt(2 / B) of squared lengths, the same error for all gradients that are compared.

Sketches are float64, gradients of the type of the models.

Shape suffixes: N prefixes (response tokens), V vocabulary, A = V one token after the other, K candidates or m samples,
P parameters, B numbers of a sketch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from titan_opd.config.schema import SamplingConfig
from titan_opd.data import PackedBatch
from titan_opd.losses import Objective, TeacherScores, distillation_loss
from titan_opd.models import Decoder, PackedAttention
from titan_opd.rollout import Recording
from titan_opd.rollout.sampler import Sampler

_STEP = 1e-6  # of the central differences: truncation and rounding errors are then both about 1e-9, relatively


def next_token_logits(decoder: Decoder, batch: PackedBatch, vocab_size: int) -> Tensor:
    """[N, V] the logits that predict each response token, of the `vocab_size` tokens that exist."""
    attention = PackedAttention(batch.cu_seqlens, batch.max_seqlen)
    hidden_TH = decoder(batch.input_ids, batch.positions, attention)
    return hidden_TH[batch.loss_positions] @ decoder.lm_head_weight[:vocab_size].T


@dataclass(frozen=True)
class Distributions:
    """Who says what about the next token at N prefixes; log-probabilities [N, V].

    Attributes:
        log_p: the current student.
        log_q: the teacher.
        log_behavior: the policy that chooses candidates and samples.
    """

    log_p: Tensor
    log_q: Tensor
    log_behavior: Tensor

    def scores(self, ids_NK: Tensor) -> TeacherScores:
        """What any sparse or sampled objective can ask about the candidates or samples `ids_NK`.

        The proximal policy is the current student, as it is with one optimizer step a batch.
        """
        return TeacherScores(
            ids=ids_NK,
            logprobs=self.log_q.gather(1, ids_NK),
            tail_logprobs=self.log_q.scatter(1, ids_NK, -torch.inf).logsumexp(-1),
            behavior_logprobs=self.log_behavior.gather(1, ids_NK),
            proximal_logprobs=self.log_p.gather(1, ids_NK),
        )

    def dense_scores(self) -> TeacherScores:
        """The teacher's whole distribution."""
        return TeacherScores(hidden=self.log_q, lm_head_weight=_identity(self.log_q))

    def proposal(self, objective: Objective) -> Tensor:
        """[N, V] log-probabilities of the distribution that the objective's candidates or samples come from."""
        from_teacher = objective.support == "teacher_topk" or objective.kind == "mc_forward_kl"
        return self.log_q if from_teacher else self.log_behavior


def logit_gradient(objective: Objective, log_p_NV: Tensor, scores: TeacherScores) -> Tensor:
    """[N, V] the gradient of the mean loss over the prefixes in the student's logits."""
    with torch.enable_grad():
        logits_NV = log_p_NV.detach().requires_grad_()
        weights_N = torch.ones(len(logits_NV), dtype=logits_NV.dtype)
        output = distillation_loss(logits_NV, _identity(logits_NV), objective, scores, weights_N)
        return torch.autograd.grad(output.loss, logits_NV)[0]


def dense_gradient(kind: str, rows: Distributions) -> Tensor:
    """[N, V] the gradient of a divergence over the whole vocabulary."""
    return logit_gradient(Objective(kind, support="dense"), rows.log_p, rows.dense_scores())


def topk_gradient(objective: Objective, rows: Distributions, k: int) -> Tensor:
    """[N, V] the gradient on the `k` most likely tokens of the teacher, or of the behaviour policy."""
    ids_NK = rows.proposal(objective).topk(k, dim=-1).indices
    return logit_gradient(objective, rows.log_p, rows.scores(ids_NK))


def sampled_gradient(objective: Objective, rows: Distributions, num_samples: int, seed: int) -> Tensor:
    """[N, V] the gradient on `num_samples` fresh samples at each prefix, drawn by the engine's sampler."""
    sampler = Sampler(SamplingConfig(), Recording(num_samples), vocab_size=rows.log_p.shape[1], seed=seed)
    numbers_N = torch.arange(len(rows.log_p))
    draws = sampler.draw(rows.proposal(objective), numbers_N, torch.zeros_like(numbers_N))
    return logit_gradient(objective, rows.log_p, rows.scores(draws.sampled_ids))


def gradient_of_each_token(objective: Objective, rows: Distributions) -> Tensor:
    """[A, N, V] the gradient when token a is the sample at every prefix.

    The gradient on m samples is a mean of these, prefix by prefix, for every objective on samples but m2po, whose bound
    depends on all samples together.
    """
    assert objective.correction != "m2po"
    num_prefixes, vocab_size = rows.log_p.shape
    return torch.stack(
        [
            logit_gradient(objective, rows.log_p, rows.scores(torch.full((num_prefixes, 1), token)))
            for token in range(vocab_size)
        ]
    )


def expected_gradient(gradient_ANV: Tensor, log_proposal_NV: Tensor) -> Tensor:
    """[N, V] the exact expectation over the sample."""
    return torch.einsum("na,anv->nv", log_proposal_NV.exp(), gradient_ANV)


@dataclass(frozen=True)
class SampleMoments:
    """Moments of the gradient's sketch when there is one sample at each prefix: exact, as prefixes are independent.

    Attributes:
        variance: E‖x‖², x = g - E g.
        covariance_square: the covariance's squared Frobenius norm.
        fourth_cumulant: E‖x‖⁴ - (E‖x‖²)² - 2 covariance_square.
    """

    variance: float
    covariance_square: float
    fourth_cumulant: float

    @classmethod
    def of(cls, gradient_ANV: Tensor, log_proposal_NV: Tensor, sketch_BNV: Tensor) -> SampleMoments:
        """The moments over the sample, from the gradient of each token."""
        centred_ANV = gradient_ANV - expected_gradient(gradient_ANV, log_proposal_NV)
        weighted_NAB = torch.einsum("anv,bnv->nab", centred_ANV, sketch_BNV)
        weighted_NAB *= (log_proposal_NV / 2).exp()[:, :, None]  # so that sums over tokens are expectations
        products_NAA = weighted_NAB @ weighted_NAB.mT
        variances_NA = products_NAA.diagonal(dim1=1, dim2=2)
        fourth_moments_N = (variances_NA.square() / log_proposal_NV.exp()).sum(-1)
        cumulants_N = fourth_moments_N - variances_NA.sum(-1).square() - 2 * products_NAA.square().sum((1, 2))
        covariance_BB = torch.einsum("nab,nac->bc", weighted_NAB, weighted_NAB)
        return cls(float(variances_NA.sum()), float(covariance_BB.square().sum()), float(cumulants_N.sum()))

    def of_mean(self, num_samples: int) -> SampleMoments:
        """The moments when there are `num_samples` independent samples at each prefix."""
        return SampleMoments(
            self.variance / num_samples, self.covariance_square / num_samples**2, self.fourth_cumulant / num_samples**3
        )


class GradientSketch:
    """Adds the parameters' gradient up in B buckets, each number with a random sign.

    Args:
        num_parameters: P.
        size: B.
        seed: of buckets and signs.
    """

    def __init__(self, num_parameters: int, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.size = size
        self._buckets_P = torch.randint(size, (num_parameters,), generator=generator)
        self._signs_P = torch.randint(2, (num_parameters,), generator=generator).double() * 2 - 1

    def __call__(self, gradient_P: Tensor) -> Tensor:
        """[B] float64, the sketch of a gradient in all parameters."""
        return torch.zeros(self.size, dtype=torch.float64).index_add_(0, self._buckets_P, self._signs_P * gradient_P)

    @torch.no_grad()
    def at_prefixes(self, decoder: Decoder, batch: PackedBatch, vocab_size: int) -> Tensor:
        """[B, N, V] the linear map from gradients in the logits at these prefixes to sketches.

        Bucket b's row is the derivative of the logits along the bucket's signs, by central differences.
        """
        parameters_P = parameters_to_vector(decoder.parameters())
        rows = []
        for bucket in range(self.size):
            step_P = _STEP * self._signs_P * (self._buckets_P == bucket)
            ends = []
            for moved_P in (parameters_P + step_P, parameters_P - step_P):
                vector_to_parameters(moved_P, decoder.parameters())
                ends.append(next_token_logits(decoder, batch, vocab_size))
            rows.append((ends[0] - ends[1]) / (2 * _STEP))
        vector_to_parameters(parameters_P, decoder.parameters())
        return torch.stack(rows)


def _identity(like_NV: Tensor) -> Tensor:
    return torch.eye(like_NV.shape[1], dtype=like_NV.dtype)
