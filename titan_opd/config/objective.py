"""`Objective`: which loss, on which support, with which correction. The mathematics is in `titan_opd/losses`."""

from __future__ import annotations

from dataclasses import dataclass

from titan_opd.config.options import check_section, option

TOP_K_SUPPORTS = ("teacher_topk", "student_topk")

# The supports of each kind; the first is the one taken when the configuration names none.
SUPPORTS_OF_KIND: dict[str, tuple[str, ...]] = {
    "forward_kl": ("teacher_topk", "student_topk", "dense"),
    "reverse_kl": ("student_topk", "teacher_topk", "dense"),
    "mixed_kl": ("teacher_topk", "student_topk", "dense"),
    "jsd": ("teacher_topk", "student_topk", "dense"),
    "skew_forward_kl": ("teacher_topk", "student_topk", "dense"),
    "skew_reverse_kl": ("student_topk", "teacher_topk", "dense"),
    "total_variation": ("teacher_topk", "student_topk", "dense"),
    "alpha_beta": ("teacher_topk", "student_topk", "dense"),
    "adaptive_kl": ("dense",),
    "mc_forward_kl": ("sampled",),
    "policy_gradient": ("sampled", "student_topk"),
    "hybrid": ("sampled", "dense"),
    "cross_entropy": ("labels",),
}
KINDS = tuple(SUPPORTS_OF_KIND)
DIVERGENCES = KINDS[: KINDS.index("mc_forward_kl")]  # sums over a support, as opposed to estimates from samples
SUPPORTS = ("dense", *TOP_K_SUPPORTS, "sampled", "labels")
TAILS = ("bucket", "renormalize", "drop")
CORRECTIONS = ("importance", "none", "truncated", "masked", "ppo_clip", "decoupled", "m2po")

_DEFAULT_ALPHA = {"mixed_kl": 0.5, "skew_forward_kl": 0.1, "skew_reverse_kl": 0.1, "alpha_beta": 0.2}
_DEFAULT_BETA = {"jsd": 0.5, "alpha_beta": 0.7}


@dataclass(frozen=True)
class Objective:
    """What is minimised, token by token. With p the student and q the teacher, both at `temperature`.

    An option that is None takes the default named in its documentation if the kind and the correction use it, and
    stays None if they do not. Setting an option that is not used is an error, never ignored.
    """

    kind: str = option(doc="the divergence or estimator; titan_opd/losses/README.md has the table", choices=KINDS)
    support: str | None = option(
        None,
        "where the kind is evaluated: the whole vocabulary, the teacher's or the student's most likely tokens, samples "
        "of the rollout, or labels; by default student_topk for reverse_kl and skew_reverse_kl, dense for adaptive_kl, "
        "sampled for mc_forward_kl, policy_gradient and hybrid, labels for cross_entropy, else teacher_topk",
        choices=SUPPORTS,
    )
    tail: str | None = option(
        None,
        "mass outside a top-k support: one more outcome (bucket, the default), rescaled to 1 on the support "
        "(renormalize), or left out (drop: the sum is no divergence and can be negative)",
        choices=TAILS,
    )
    temperature: float = option(1.0, "divides the logits of both sides; scores must be at it already", above=0)
    alpha: float | None = option(
        None,
        "mixed_kl: weight of the forward KL (0.5); skew_forward_kl, skew_reverse_kl: share of the first argument in "
        "the mixture (0.1); alpha_beta: the teacher's exponent (0.2)",
        minimum=0,
        maximum=1,
    )
    beta: float | None = option(
        None,
        "jsd: the teacher's share of the mixture (0.5); alpha_beta: the student's exponent (0.7)",
        minimum=0,
        maximum=1,
    )
    mu: float | None = option(
        None, "adaptive_kl: mass of the teacher's most likely tokens that make its head (0.5)", above=0, maximum=1
    )
    advantage: str | None = option(
        None,
        "policy_gradient: log q - log p with the current student (learner, the default) or with the policy that "
        "wrote the sample (rollout)",
        choices=("learner", "rollout"),
    )
    correction: str | None = option(
        None, "policy_gradient: what is done about stale samples (importance)", choices=CORRECTIONS
    )
    clip_low: float | None = option(
        None, "ppo_clip, decoupled: ratios are clipped below at 1 - clip_low (0.2)", minimum=0, maximum=1
    )
    clip_high: float | None = option(
        None, "ppo_clip, decoupled: ratios are clipped above at 1 + clip_high (0.2)", minimum=0
    )
    dual_clip: float | None = option(
        None,
        "ppo_clip, decoupled, m2po: where the advantage A is negative the loss is at most -dual_clip * A; by default "
        "there is no such bound",
        above=1,
    )
    cap: float | None = option(
        None, "truncated: largest ratio; decoupled: samples with p_prox / p_behavior above it are dropped (2)", above=0
    )
    band: tuple[float, float] | None = option(
        None, "masked: samples whose ratio is outside are dropped (0.5 to 2)", minimum=0
    )
    m2_budget: float | None = option(
        None, "m2po: largest mean squared log-ratio of the samples whose clip would bind (0.04)", minimum=0
    )
    staleness_discount: float = option(
        1.0, "a row's weight is multiplied by this, once for each version its token is behind", above=0, maximum=1
    )
    min_logprob: float = option(-30.0, "the teacher's log-probabilities are clamped below at this", maximum=0)

    def __post_init__(self) -> None:
        if isinstance(self.band, list):  # as TOML and JSON have it
            object.__setattr__(self, "band", tuple(self.band))
        check_section(self, "objective")
        self._resolve_support()
        self._resolve("tail", "bucket", used=self.is_divergence and self.support in TOP_K_SUPPORTS)
        self._resolve("alpha", _DEFAULT_ALPHA.get(self.kind), used=self.kind in _DEFAULT_ALPHA)
        self._resolve("beta", _DEFAULT_BETA.get(self.kind), used=self.kind in _DEFAULT_BETA)
        self._resolve("mu", 0.5, used=self.kind == "adaptive_kl")
        self._resolve("advantage", "learner", used=self.kind == "policy_gradient")
        self._resolve("correction", "importance", used=self.kind == "policy_gradient")
        clips = self.correction in ("ppo_clip", "decoupled")
        self._resolve("clip_low", 0.2, used=clips)
        self._resolve("clip_high", 0.2, used=clips)
        self._resolve("dual_clip", None, used=clips or self.correction == "m2po")
        self._resolve("cap", 2.0, used=self.correction in ("truncated", "decoupled"))
        self._resolve("band", (0.5, 2.0), used=self.correction == "masked")
        self._resolve("m2_budget", 0.04, used=self.correction == "m2po")
        self._check_values()

    @property
    def is_divergence(self) -> bool:
        """Whether the kind is a sum over a support, as opposed to an estimate from samples or labels."""
        return self.kind in DIVERGENCES

    def _resolve_support(self) -> None:
        allowed = SUPPORTS_OF_KIND[self.kind]
        if self.support is None:
            object.__setattr__(self, "support", allowed[0])
        if self.support in allowed:
            return
        fix = f"choose {' or '.join(repr(name) for name in allowed)}, or leave it out"
        if self.is_divergence and self.support == "sampled":
            # The divergence's terms on samples, differentiated as they stand, have a gradient without the teacher.
            fix = "on samples of the student choose kind = 'policy_gradient', on the teacher's 'mc_forward_kl'"
        raise ValueError(f"objective.support = {self.support!r} does not go with kind = {self.kind!r}; {fix}")

    def _resolve(self, name: str, default: object, *, used: bool) -> None:
        value = getattr(self, name)
        if value is None and used:
            object.__setattr__(self, name, default)
        if value is not None and not used:
            settings = [f"kind = {self.kind!r}", f"support = {self.support!r}"]
            if self.correction is not None:
                settings.append(f"correction = {self.correction!r}")
            raise ValueError(f"objective.{name} = {value!r} has no effect with {', '.join(settings)}; leave it out")

    def _check_values(self) -> None:
        if self.band is not None and not self.band[0] < self.band[1]:
            raise ValueError(f"objective.band = {self.band} is empty; its first value must be below its second")
        if self.kind == "alpha_beta" and not (self.alpha > 0 and self.beta > 0):
            raise ValueError(
                f"objective.alpha = {self.alpha}, objective.beta = {self.beta}: alpha_beta divides by both; "
                "make them positive, or use forward_kl (the limit beta -> 0) or reverse_kl (alpha -> 0)"
            )
        if self.kind == "jsd" and self.beta in (0, 1):
            raise ValueError(
                f"objective.beta = {self.beta}: jsd is 0 for any student there; choose a value between 0 and 1, "
                "or kind = 'forward_kl' or 'reverse_kl'"
            )
        if self.kind in ("skew_forward_kl", "skew_reverse_kl") and self.alpha == 1:
            raise ValueError(f"objective.alpha = 1.0: {self.kind} is 0 for any student there; choose a smaller value")
