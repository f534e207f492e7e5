"""The study's results as a page in Markdown with plots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from svg_plot import Line, write_plot

from titan_opd.losses import Objective

from .fixed_prefixes import (
    DUAL_CLIP,
    FORWARD_TOPK,
    M2PO,
    NUM_SAMPLES,
    POLICY_SAMPLED,
    POLICY_TOPK,
    REDRAWN,
    REVERSE_TOPK,
    SIZES_K,
    TEACHER_SAMPLED,
    FixedPrefixes,
)
from .fresh_batches import DENSE, FRESH_K, SHIFT_FACTOR, SPARSE, FreshBatches
from .policies import STALENESS
from .statistics import Estimate

PLOTS = {
    "bias.svg": "Bias of stale candidates and of stale samples, reverse KL",
    "variance.svg": "Noise of importance-weighted samples",
    "prefix_shift.svg": "What stale prefixes do to the dense gradients",
}
CHECK_SIGMAS = 4
_STALEST = max(STALENESS)
_EXACT = 1e-9  # what rounding leaves of a bias that is 0

DEFINITIONS = """\
Current policy: the student after the last of {steps} steps of on-policy distillation. Staleness s: candidates and
samples come from the policy s steps before it, itself one of the run's. Gradient: of the mean loss over response tokens
in all parameters of the current student, as a count sketch of {sketch} numbers (relative error of squared lengths
about {sketch_error:.0%}, the same for whatever is compared); float64 at fixed prefixes, float32 over fresh batches. All
biases and deviations are over the length of the dense gradient, that is of the same divergence over the whole
vocabulary. Bias at fixed prefixes: of the exact expectation over the sample. Deviation: root of the expected squared
distance to the expectation. Errors are one sigma."""


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def failed_checks(fixed: FixedPrefixes) -> list[str]:
    """The ratios of variances that are more than `CHECK_SIGMAS` from 1, in words."""
    return [
        f"{name}, m = {m}, s = {s}: {ratio}"
        for (name, m, s), ratio in fixed.variance_ratio.items()
        if ratio.sigmas_from(1) > CHECK_SIGMAS
    ]


def write_report(folder: Path, title: str, definitions: str, fixed: FixedPrefixes, fresh: FreshBatches) -> str:
    """Write `report.md` and its plots into `folder`; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_plots(folder, fixed, fresh)
    sections = [
        f"# Bias and variance of gradient estimators\n\n{title}\n\n{definitions}",
        _policies(fixed, fresh),
        _first_question(fixed),
        _variance(fixed),
        _second_question(fresh),
        _whole_error(fresh),
        _all_supports(fixed),
    ]
    page = "\n\n".join(sections) + "\n"
    (folder / "report.md").write_text(page)
    return page


def _policies(fixed: FixedPrefixes, fresh: FreshBatches) -> str:
    rows = [
        [
            s,
            f"{facts.divergence:.4f}",
            f"{facts.effective_sample_share:.3f}",
            f"{fresh.differing_answers[s]:.0%}",
            *(f"{facts.support_mass[k]:.2%}" for k in SIZES_K),
        ]
        for s, facts in fixed.facts.items()
    ]
    header = [
        "s",
        "KL(current ‖ stale), nats a token",
        "effective share of samples",
        "answers that differ",
        *(f"current mass on stale top {k}" for k in SIZES_K),
    ]
    return (
        f"## The policies\n\nAt {fixed.num_prefixes} prefixes of the current policy: its entropy is "
        f"{fixed.student_entropy:.3f} nats a token, the teacher's {fixed.teacher_entropy:.3f}, KL(student ‖ teacher) "
        f"{fixed.reverse_kl:.3f}. Effective share: 1 / E rho², rho the importance ratio. Answers are written with the "
        "same noise by all policies.\n\n" + markdown_table(header, rows)
    )


def _first_question(fixed: FixedPrefixes) -> str:
    weighted = POLICY_TOPK["rollout", "importance"]
    samples = POLICY_SAMPLED["learner", "importance"]
    topk = [fixed.topk_bias[weighted, FRESH_K, s] for s in STALENESS]
    worst = max(fixed.sample_bias[samples, s].value for s in STALENESS)
    noise = {s: fixed.one_sample_deviation[samples, s] for s in (0, _STALEST)}
    is_so = min(topk) > 0.01 and worst < _EXACT
    rows = [
        *(_topk_row(f"reverse KL, stale top {k}, bucket", fixed, REVERSE_TOPK["bucket"], k) for k in SIZES_K),
        *(_topk_row(f"stale top {k}, importance", fixed, weighted, k) for k in SIZES_K),
        *(_topk_row(f"stale top {k}, current weights", fixed, POLICY_TOPK["learner", "none"], k) for k in SIZES_K),
        *(
            _sample_row(f"samples, {correction}, {advantage}'s advantage", fixed, objective)
            for (advantage, correction), objective in POLICY_SAMPLED.items()
        ),
        _sample_row("samples, ppo_clip with dual_clip = 3, learner's advantage", fixed, DUAL_CLIP),
        _sample_row(f"samples, m2po, learner's advantage (m = {max(NUM_SAMPLES)}, from redraws)", fixed, M2PO),
    ]
    return (
        "## Is a stale top-k reverse KL biased beyond repair by importance weights, while Monte Carlo is not?\n\n"
        f"**{'Yes' if is_so else 'Not on these models'}.** The importance-weighted stale top {FRESH_K} is off by "
        f"{_rounded(topk[0])} at s = 0, where only the cut does it, and by "
        f"{', '.join(f'{_rounded(bias)} at s = {s}' for s, bias in zip(STALENESS[1:], topk[1:], strict=True))}: a "
        f"token outside the support has no weight to be corrected. Importance-weighted samples are off by at most "
        f"{worst:.0e}, which is rounding. Their price is noise: one sample a token deviates by {noise[0]:.3g} lengths "
        f"of the gradient at s = 0 and by {noise[_STALEST]:.3g} at s = {_STALEST}, m samples by that over the root of "
        f"m.\n\nBias at fixed prefixes, the candidates and samples of the stale policy. Bucket: the divergence of "
        "the current student on the stale support and all else as one token. Importance, current weights: policy "
        "gradient on the stale support, the terms weighted by the stale policy and corrected by importance ratios "
        "(rollout's advantage), or weighted by the current student (learner's advantage, no correction).\n\n"
        f"{_by_staleness(rows)}\n\n![{PLOTS['bias.svg']}](bias.svg)"
    )


def _variance(fixed: FixedPrefixes) -> str:
    failed = failed_checks(fixed)
    ratios = fixed.variance_ratio
    worst = max(ratio.sigmas_from(1) for ratio in ratios.values())
    verdict = f"All {len(ratios)} ratios are 1 within {CHECK_SIGMAS} standard errors (the farthest: {worst:.1f})."
    if failed:
        verdict = f"**{len(failed)} of {len(ratios)} ratios are not 1:** {'; '.join(failed)}."
    checked = [
        [name, s, *(ratios[name, m, s] for m in NUM_SAMPLES)]
        for name in REDRAWN
        for s in STALENESS
        if (name, 1, s) in ratios
    ]
    noise = [
        [f"samples, {correction}, {advantage}'s advantage", objective]
        for (advantage, correction), objective in POLICY_SAMPLED.items()
    ]
    noise += [["samples, ppo_clip with dual_clip = 3, learner's advantage", DUAL_CLIP]]
    noise += [["samples of the teacher, mc_forward_kl", TEACHER_SAMPLED]]
    noise_rows = [[name, *(f"{fixed.one_sample_deviation[key, s]:.3g}" for s in STALENESS)] for name, key in noise]
    return (
        "## Is the variance of m samples one sample's over m?\n\n"
        f"{verdict}\n\nm times the variance over redraws at the same prefixes, over the exact variance of one sample; "
        "the standard errors are exact too (from fourth moments). A large error means that rare large ratios carry the "
        "variance: redraws stay below it until they meet one.\n\n"
        f"{markdown_table(['', 's', *(f'm = {m}' for m in NUM_SAMPLES)], checked)}\n\n"
        "Deviation of one sample at each prefix, exact; with m samples over the root of m:\n\n"
        f"{_by_staleness(noise_rows)}\n\n![{PLOTS['variance.svg']}](variance.svg)"
    )


def _second_question(fresh: FreshBatches) -> str:
    ratio = fresh.shift_ratio[_STALEST]
    answer = "Undecided by these numbers"
    if ratio.value > 1 + 2 * ratio.error:
        answer = "Yes"
    elif ratio.value < 1 - 2 * ratio.error:
        answer = "No"
    rows = [
        [
            s,
            *(percent(fresh.prefix_shift[kind, s]) for kind in ("forward_kl", "reverse_kl")),
            fresh.shift_ratio.get(s, "-"),
        ]
        for s in STALENESS
    ]
    num_answers = fresh.num_batches * fresh.answers_per_batch * SHIFT_FACTOR
    topk = [fresh.bias[f"{name} top {FRESH_K}", _STALEST] for name in ("forward KL, teacher's", "reverse KL, stale")]
    return (
        "## Does the forward KL's gradient suffer less from stale prefixes than the reverse KL's?\n\n"
        f"**{answer}.** At s = {_STALEST} the reverse KL's shift is {ratio} times the forward KL's. Distance between "
        f"the expected dense gradients on the stale policy's prefixes and on the current one's, from {num_answers} "
        "answers of each policy to the same prompts with the same noise (with stale candidates too, as in the table of "
        f"the whole error: {percent(topk[0])} on the teacher's top {FRESH_K} for the forward KL, {percent(topk[1])} "
        f"on the stale student's for the reverse KL):\n\n"
        + markdown_table(["s", "forward KL", "reverse KL", "reverse over forward"], rows)
        + f"\n\n![{PLOTS['prefix_shift.svg']}](prefix_shift.svg)"
    )


def _whole_error(fresh: FreshBatches) -> str:
    names = [estimator.name for estimator in DENSE + SPARSE]
    bias = [[name, *(percent(fresh.bias[name, s]) for s in STALENESS)] for name in names]
    deviation = [[name, *(fresh.deviation[name, s] for s in STALENESS)] for name in names]
    return (
        f"## The whole error of a batch's gradient\n\nOver {fresh.num_batches} batches of {fresh.answers_per_batch} "
        "answers, prompts and rollouts fresh, everything of the stale policy. Bias, against the dense gradient on the "
        f"current policy's prefixes:\n\n{_by_staleness(bias)}\n\n"
        f"Deviation of one batch's gradient; what samples add is the difference to the dense one's:\n\n"
        f"{_by_staleness(deviation)}"
    )


def _all_supports(fixed: FixedPrefixes) -> str:
    families = {
        **{f"forward KL, teacher's top {{}}, {tail}": one for tail, one in FORWARD_TOPK.items()},
        **{f"reverse KL, stale top {{}}, {tail}": one for tail, one in REVERSE_TOPK.items()},
        **{
            f"policy gradient, stale top {{}}, {correction}, {advantage}'s advantage": one
            for (advantage, correction), one in POLICY_TOPK.items()
        },
    }
    rows = [_topk_row(name.format(k), fixed, one, k) for name, one in families.items() for k in SIZES_K]
    return (
        "## All supports and tails\n\nBias at fixed prefixes.\n\n<details><summary>Table</summary>\n\n"
        f"{_by_staleness(rows)}\n\n</details>"
    )


def percent(share: Estimate) -> str:
    """A share in percent, with its error."""
    return f"{share * 100} %"


def _by_staleness(rows: Iterable[Sequence[object]]) -> str:
    return markdown_table(["", *(f"s = {s}" for s in STALENESS)], rows)


def _topk_row(name: str, fixed: FixedPrefixes, objective: Objective, k: int) -> list[str]:
    return [name, *(_rounded(fixed.topk_bias[objective, k, s]) for s in STALENESS)]


def _sample_row(name: str, fixed: FixedPrefixes, objective: Objective) -> list[str]:
    biases = [fixed.sample_bias[objective, s] for s in STALENESS]
    return [name, *(percent(bias) if bias.error else _rounded(bias.value) for bias in biases)]


def _rounded(bias: float) -> str:
    return "0 %" if bias < _EXACT else f"{100 * bias:.3g} %"


def _write_plots(folder: Path, fixed: FixedPrefixes, fresh: FreshBatches) -> None:
    topk = {
        f"top {FRESH_K}, bucket": REVERSE_TOPK["bucket"],
        f"top {FRESH_K}, current weights": POLICY_TOPK["learner", "none"],
        f"top {FRESH_K}, importance weights": POLICY_TOPK["rollout", "importance"],
    }
    samples = {
        "samples, no correction": POLICY_SAMPLED["learner", "none"],
        "samples, PPO's clip": POLICY_SAMPLED["learner", "ppo_clip"],
        "samples, importance weights": POLICY_SAMPLED["learner", "importance"],
    }
    lines = [
        Line(name, STALENESS, [100 * fixed.topk_bias[one, FRESH_K, s] for s in STALENESS]) for name, one in topk.items()
    ]
    for name, one in samples.items():
        lines.append(Line(name, STALENESS, [100 * fixed.sample_bias[one, s].value for s in STALENESS]))
    write_plot(
        folder / "bias.svg",
        PLOTS["bias.svg"],
        lines,
        x_label="staleness, optimizer steps",
        y_label="bias, % of the dense gradient",
    )
    write_plot(
        folder / "variance.svg",
        PLOTS["variance.svg"],
        [line for s in STALENESS for line in _noise_lines(fixed, s)],
        x_label="m, samples a token",
        y_label="deviation over dense gradient",
        log_x=True,
        log_y=True,
    )
    shifts = [
        Line(
            name,
            STALENESS,
            [100 * fresh.prefix_shift[kind, s].value for s in STALENESS],
            [100 * fresh.prefix_shift[kind, s].error for s in STALENESS],
        )
        for kind, name in (("forward_kl", "forward KL"), ("reverse_kl", "reverse KL"))
    ]
    write_plot(
        folder / "prefix_shift.svg",
        PLOTS["prefix_shift.svg"],
        shifts,
        x_label="staleness, optimizer steps",
        y_label="shift, % of the dense gradient",
    )


def _noise_lines(fixed: FixedPrefixes, staleness: int) -> list[Line]:
    """The deviation of m samples as measured, and as it follows from one sample's."""
    exact = fixed.one_sample_deviation[POLICY_SAMPLED["learner", "importance"], staleness]
    ratios = [fixed.variance_ratio["importance", m, staleness] for m in NUM_SAMPLES]
    color = STALENESS.index(staleness)
    measured = [exact * math.sqrt(ratio.value / m) for ratio, m in zip(ratios, NUM_SAMPLES, strict=True)]
    expected = [exact / math.sqrt(m) for m in NUM_SAMPLES]
    return [
        Line(f"s = {staleness}, redraws", NUM_SAMPLES, measured, color=color),
        Line(f"s = {staleness}, exact", NUM_SAMPLES, expected, dashed=True, color=color),
    ]
