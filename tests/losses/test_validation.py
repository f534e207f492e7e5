"""What a caller can get wrong is refused with the name of what is wrong."""

from dataclasses import replace

import pytest
import torch

from tests.losses.scenes import build_scene
from titan_opd.losses import Objective


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "forwardkl"}, "did you mean 'forward_kl'"),
        ({"kind": "cross_entropy", "support": "teacher_topk"}, "cross_entropy.*choose 'labels'"),
        ({"kind": "forward_kl", "support": "sampled"}, "mc_forward_kl"),
        ({"kind": "adaptive_kl", "support": "teacher_topk"}, "choose 'dense'"),
        ({"kind": "forward_kl", "support": "dense", "tail": "bucket"}, r"objective\.tail = 'bucket' has no effect"),
        ({"kind": "policy_gradient", "support": "student_topk", "tail": "drop"}, r"objective\.tail"),
        ({"kind": "jsd", "beta": 1.2}, r"objective\.beta = 1\.2 must be at most 1"),
        ({"kind": "jsd", "beta": 0.0}, "0 for any student"),
        ({"kind": "skew_forward_kl", "alpha": 1.0}, "0 for any student"),
        ({"kind": "alpha_beta", "alpha": 0.0}, "divides by both"),
        ({"kind": "forward_kl", "alpha": 0.5}, r"objective\.alpha = 0\.5 has no effect"),
        ({"kind": "forward_kl", "correction": "m2po"}, r"objective\.correction = 'm2po' has no effect"),
        ({"kind": "policy_gradient", "cap": 2.0}, r"objective\.cap = 2\.0 has no effect.*'importance'"),
        ({"kind": "policy_gradient", "correction": "masked", "band": (2.0, 0.5)}, r"objective\.band"),
        ({"kind": "policy_gradient", "correction": "ppo_clip", "dual_clip": 1.0}, r"objective\.dual_clip"),
        ({"kind": "forward_kl", "temperature": 0.0}, r"objective\.temperature"),
        ({"kind": "forward_kl", "staleness_discount": 0.0}, r"objective\.staleness_discount"),
        ({"kind": "forward_kl", "min_logprob": 1.0}, r"objective\.min_logprob"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        Objective(**settings)


def test_settings_take_the_natural_value():
    assert Objective("reverse_kl").support == "student_topk"
    assert Objective("forward_kl").tail == "bucket"
    assert Objective("policy_gradient").correction == "importance"
    assert Objective("policy_gradient", correction="masked", band=[0.1, 3]).band == (0.1, 3)
    for kind in ("forward_kl", "policy_gradient", "cross_entropy", "alpha_beta"):
        resolved = Objective(kind)
        assert replace(resolved) == resolved  # what it resolved to is allowed


@pytest.mark.parametrize(
    ("objective", "field"),
    [
        (Objective("forward_kl"), "logprobs"),
        (Objective("forward_kl", support="dense"), "lm_head_weight"),
        (Objective("policy_gradient"), "behavior_logprobs"),
        (Objective("policy_gradient", correction="none", advantage="rollout"), "behavior_logprobs"),
        (Objective("policy_gradient", correction="decoupled"), "proximal_logprobs"),
        (Objective("cross_entropy"), "labels"),
        (Objective("hybrid", support="dense"), "labels"),
    ],
)
def test_a_missing_field_is_named(objective, field):
    scene = build_scene(objective)
    with pytest.raises(ValueError, match=rf"TeacherScores\.{field} is missing"):
        scene.with_scores(**{field: None}).loss()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ids", torch.zeros(5, 4, dtype=torch.int64), r"ids must be \[6, K\]"),
        ("ids", torch.zeros(6, 4), "int32 or int64"),
        ("logprobs", torch.zeros(6, 3), r"logprobs must be \[6, 4\]"),
        ("logprobs", torch.zeros(6, 4, dtype=torch.int64), "floating"),
        ("tail_logprobs", torch.zeros(6, 1), r"tail_logprobs must be \[6\]"),
        ("valid", torch.ones(6, 4), "bool"),
    ],
)
def test_a_field_of_the_wrong_shape_or_type_is_named(field, value, message):
    with pytest.raises(ValueError, match=message):
        build_scene(Objective("forward_kl")).with_scores(**{field: value}).loss()


def test_wrong_arguments():
    scene = build_scene(Objective("forward_kl", staleness_discount=0.9))
    with pytest.raises(ValueError, match="policy_versions"):
        scene.loss()
    with pytest.raises(ValueError, match=r"row 2.*future"):
        scene.loss(policy_versions=torch.tensor([3, 3, 4, 3, 3, 3]), current_version=3)
    with pytest.raises(ValueError, match="num_tokens = 0"):
        scene.loss(num_tokens=0)
    with pytest.raises(ValueError, match=r"vocab_size = 20, but the output projection has 19 rows"):
        scene.loss(vocab_size=20, policy_versions=torch.zeros(6, dtype=torch.int32), current_version=0)
    with pytest.raises(ValueError, match="select the rows of response tokens"):
        scene.loss(hidden=scene.hidden[None])
    with pytest.raises(ValueError, match=r"token_weights must be \[N\] with N = 6"):
        replace(scene, token_weights=torch.ones(5)).loss()
    with pytest.raises(ValueError, match="row 1: token_weights is not finite"):
        replace(build_scene(Objective("forward_kl")), token_weights=torch.tensor([1, torch.nan, 1, 1, 1, 1])).loss()
    hybrid = build_scene(Objective("hybrid"))
    with pytest.raises(ValueError, match="2 columns"):
        hybrid.with_scores(ids=hybrid.scores.ids[:, :1], logprobs=hybrid.scores.logprobs[:, :1]).loss()


def spoil(tensor, row, value):
    spoilt = tensor.clone()
    spoilt[row] = value
    return spoilt


@pytest.mark.parametrize(
    ("objective", "field", "value", "message"),
    [
        (Objective("forward_kl"), "ids", 7, "row 3.*same id twice"),
        (Objective("policy_gradient", support="student_topk"), "ids", 7, "row 3.*same id twice"),
        (Objective("forward_kl"), "ids", 19, r"row 3.*outside 0 \.\. 18"),
        (Objective("mc_forward_kl"), "ids", -1, "row 3.*mark padding"),
        (Objective("forward_kl"), "logprobs", torch.nan, "row 3.*TeacherScores.logprobs is NaN"),
        (Objective("forward_kl"), "logprobs", 0.7, "row 3.*above 0"),
        (Objective("forward_kl"), "tail_logprobs", torch.nan, "row 3.*tail_logprobs"),
        (Objective("policy_gradient"), "behavior_logprobs", -torch.inf, "row 3.*behavior_logprobs.*finite"),
        (Objective("policy_gradient", correction="decoupled"), "proximal_logprobs", torch.nan, "row 3.*proximal"),
        (Objective("cross_entropy"), "labels", -100, "row 3.*weight 0"),
    ],
)
def test_values_that_cannot_be_right_are_refused_with_their_row(objective, field, value, message):
    scene = build_scene(objective)
    spoilt = scene.with_scores(**{field: spoil(getattr(scene.scores, field), 3, value)})
    with pytest.raises(ValueError, match=message):
        spoilt.loss()
    # The same in a row that does not count is nobody's business.
    replace(spoilt, token_weights=spoil(spoilt.token_weights, 3, 0)).loss()


def test_a_sample_outside_the_kept_set_is_refused():
    scene = build_scene(Objective("policy_gradient"))
    kept = scene.scores.ids.clone()
    scene.with_scores(behavior_support=kept).loss()
    with pytest.raises(ValueError, match=r"row 1.*behavior_support lacks"):
        scene.with_scores(behavior_support=spoil(kept, 1, -1)).loss()


def test_vocabularies_that_differ_need_the_number_of_tokens():
    scene = build_scene(Objective("reverse_kl", support="dense"))
    wider = torch.cat([scene.scores.lm_head_weight, torch.full((3, 5), 9.0, dtype=torch.float64)])
    with pytest.raises(ValueError, match="19 rows, the teacher's 22; pass vocab_size"):
        scene.with_scores(lm_head_weight=wider).loss()
    torch.testing.assert_close(scene.with_scores(lm_head_weight=wider).loss(vocab_size=19).loss, scene.loss().loss)
