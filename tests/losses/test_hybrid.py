"""Hybrid distillation: its weights, and the dense route that draws the student's sample itself."""

from dataclasses import replace

import pytest
import torch

from tests.losses.scenes import build_scene
from titan_opd.losses import Objective, TeacherScores
from titan_opd.losses.hybrid import hybrid_weights
from titan_opd.losses.hybrid_route import draw_row_keys
from titan_opd.losses.vocab_parallel import VocabShard


@pytest.mark.parametrize(
    ("q", "p", "same", "expected"),
    [
        # (expert, own): the teacher wants more of the expert's token and less of the student's own.
        ((0.5, 0.1), (0.2, 0.4), False, (2 * 0.5 + 0.2 * torch.tensor(2.5).log(), 0.4 * torch.tensor(0.25).log())),
        # More of both: the own token is left alone.
        ((0.5, 0.4), (0.2, 0.1), False, (0.5 + 0.2 * torch.tensor(2.5).log(), 0)),
        # Less of the expert's token: only the reverse KL's term.
        ((0.1, 0.4), (0.4, 0.1), False, (0.4 * torch.tensor(0.25).log(), 0)),
        ((0.1, 0.1), (0.4, 0.4), False, (0.4 * torch.tensor(0.25).log(), 0.4 * torch.tensor(0.25).log())),
        # The student drew the expert's token: it is not counted twice.
        ((0.1, 0.1), (0.4, 0.4), True, (0.4 * torch.tensor(0.25).log(), 0)),
    ],
)
def test_weights(q, p, same, expected):
    log_q, log_p = torch.tensor([q]).log(), torch.tensor([p]).log()
    weights = hybrid_weights(log_q, log_p, torch.tensor([same]))
    torch.testing.assert_close(weights, torch.tensor([expected]))


def test_dense_equals_sampled_with_the_drawn_token():
    """Find the drawn tokens by drawing again, score them, and go the sampled route."""
    dense = build_scene(Objective("hybrid", support="dense"), seed=1)
    keys = draw_row_keys(6, torch.device("cpu"), None, torch.Generator().manual_seed(5))  # as Scene.loss draws
    shard = VocabShard.create(dense.weight, torch.float64, None, None)
    drawn = shard.sample(dense.hidden @ dense.weight.T, keys, 1).ids[:, 0]
    log_q = (dense.scores.hidden @ dense.scores.lm_head_weight.T).log_softmax(-1)
    ids = torch.stack([dense.scores.labels, drawn], dim=-1)
    sampled = replace(
        dense, objective=Objective("hybrid"), scores=TeacherScores(ids=ids, logprobs=log_q.gather(1, ids))
    )
    for one, other in zip(dense.gradients()[1:], sampled.gradients()[1:], strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(dense.loss().per_token, sampled.reference())
    torch.testing.assert_close(dense.loss().metrics, sampled.loss().metrics)


def test_draws_repeat_with_the_generator():
    scene = build_scene(Objective("hybrid", support="dense"), seed=3, num_rows=32)

    def values(seed):
        return scene.loss(generator=torch.Generator().manual_seed(seed)).per_token

    assert torch.equal(values(1), values(1))
    assert not torch.equal(values(1), values(2))
    torch.manual_seed(1)
    from_default = scene.loss(generator=None).per_token
    torch.manual_seed(1)
    assert torch.equal(scene.loss(generator=None).per_token, from_default)
