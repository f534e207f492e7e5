"""All stored cases: the reference on full logits and the fused head, in float64 and float32."""

import pytest
import torch

from tests.losses.golden import CASE_NAMES, Case, load_cases
from titan_opd.losses import distillation_loss
from titan_opd.losses.reference import reference_per_token

EXPECTED = ("loss", "per_token", "grad_hidden", "grad_weight")


def errors(case: Case, results) -> dict[str, float]:
    """Largest error of each result, relative to the largest expected number."""
    found = {}
    for name, result in zip(EXPECTED, results, strict=True):
        expected = case.tensors[f"expected_{name}"]
        scale = expected.abs().max().clamp(min=1e-30)
        found[name] = ((result.double() - expected).abs().max() / scale).item()
    return found


def fused(case: Case):
    hidden, weight = case.leaves()
    output = distillation_loss(
        hidden,
        weight,
        case.objective,
        case.scores,
        case.tensors["loss_mask"].to(hidden.dtype),
        policy_versions=case.tensors.get("policy_versions"),
        current_version=case.settings.get("current_version"),
        vocab_size=case.settings.get("vocab_size"),
        logits_chunk_mb=512 / 2**20,  # a few rows, so that there are several chunks
    )
    output.loss.backward()
    return output.loss.detach(), output.per_token, hidden.grad, weight.grad


def reference(case: Case):
    hidden, weight = case.leaves()
    mask, vocab_size = case.tensors["loss_mask"], case.settings.get("vocab_size")
    teacher_logits = None
    if case.objective.support == "dense":
        teacher_logits = (case.scores.hidden @ case.scores.lm_head_weight.T)[mask, :vocab_size]
    logits = (hidden @ weight.T)[mask, :vocab_size]
    values = reference_per_token(logits, case.objective, case.scores[mask], teacher_logits_NV=teacher_logits)
    weights = torch.ones_like(values)
    if "policy_versions" in case.tensors:
        behind = case.settings["current_version"] - case.tensors["policy_versions"][mask]
        weights = case.objective.staleness_discount ** behind.to(values.dtype)
    loss = (weights * values).sum() / max(1, len(values)) + 0 * logits.sum()
    loss.backward()
    per_token = torch.zeros(len(mask), dtype=values.dtype).masked_scatter(mask, values.detach())
    return loss.detach(), per_token, hidden.grad, weight.grad


@pytest.mark.parametrize("name", CASE_NAMES)
def test_reference_gives_the_stored_numbers(name):
    case = load_cases()[name]
    assert max(errors(case, reference(case)).values()) < 1e-9


@pytest.mark.parametrize("name", CASE_NAMES)
def test_fused_head_in_float64(name):
    case = load_cases()[name]
    assert max(errors(case, fused(case)).values()) < 1e-9


@pytest.mark.parametrize("name", CASE_NAMES)
def test_fused_head_in_float32(name):
    """Within rounding; where that of the logits matters (some are 300), not worse than plain autograd on them."""
    case = load_cases()[name].to(torch.float32)
    plain = errors(case, reference(case))
    for field, error in errors(case, fused(case)).items():
        assert error < max(2e-5, 2 * plain[field]), field


def test_every_case_is_distinct_and_loaded():
    assert len(CASE_NAMES) == len(set(CASE_NAMES)) == 163
