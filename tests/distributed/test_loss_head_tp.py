"""The loss head with its vocabulary split among real processes: the numbers of one process, whatever the split."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.helpers.communication import CountCommunication
from tests.helpers.worlds import run_world
from tests.losses.scenes import OBJECTIVES, build_scene
from titan_opd.losses import Objective
from titan_opd.ops.dense_pair import DensePairSums

WORLD_SIZE = 4
SMALL_CHUNK_MB = 200 / 2**20  # several chunks
ONE_PER_ROUTE = (Objective("forward_kl"), Objective("jsd", support="dense"), Objective("adaptive_kl"))


def split(weight, group):
    """This rank's rows, as torch.chunk cuts them; none for the ranks that torch.chunk leaves out."""
    shards = weight.chunk(dist.get_world_size(group))
    rank = dist.get_rank(group)
    return shards[rank] if rank < len(shards) else weight[:0]


def check_split(scene, group, vocab_size, *, rtol=1e-9, atol=1e-12):
    """Loss, values, metrics and both gradients against those of the whole projection in one process."""
    written = {"written_ids": torch.arange(len(scene.hidden)) * 3 % (vocab_size or len(scene.weight))}
    expected, expected_hidden, expected_weight = scene.gradients(vocab_size=vocab_size, **written)
    sharded = replace(scene, weight=split(scene.weight, group))
    if scene.scores.lm_head_weight is not None:
        sharded = sharded.with_scores(lm_head_weight=split(scene.scores.lm_head_weight, group))
    output, grad_hidden, grad_weight = sharded.gradients(
        vocab_size=vocab_size, tp_group=group, logits_chunk_mb=SMALL_CHUNK_MB, **written
    )
    for value, wanted in (
        (output.loss, expected.loss),
        (output.per_token, expected.per_token),
        (output.metrics, expected.metrics),
        (output.written_logprobs, expected.written_logprobs),
        (grad_hidden, expected_hidden),
        (grad_weight, split(expected_weight, group)),
    ):
        torch.testing.assert_close(value, wanted, rtol=rtol, atol=atol)


def one_owner_scene():
    """All candidates on one rank, and a rank with none: the first tokens of the vocabulary are the support."""
    scene = build_scene(Objective("reverse_kl"), seed=1, num_candidates=3)
    ids = torch.arange(3).expand(6, -1)
    log_q = torch.tensor([[0.5, 0.2, 0.1]], dtype=torch.float64).log().expand(6, -1)
    return scene.with_scores(ids=ids, logprobs=log_q, tail_logprobs=None)


def check_volume(objective, group):
    """What crosses the ranks is what titan_opd/parallel/README.md's formula says, in however many chunks."""
    scene = build_scene(objective, seed=2, vocab=19).to(torch.float32)
    num_ranks = dist.get_world_size(group)
    num_rows, hidden = int((scene.token_weights != 0).sum()), scene.hidden.shape[1]
    sharded = replace(scene, weight=split(scene.weight, group))
    tables = 1  # vocabularies, whose shards and statistics the ranks tell each other
    numbers = scene.scores.ids.shape[1] if scene.scores.ids is not None else 0
    if objective.support == "dense":
        tables, numbers = 2, len(DensePairSums._fields)
        sharded = sharded.with_scores(lm_head_weight=split(scene.scores.lm_head_weight, group))
    two_rows_mb = 2 * 4 * -(-len(scene.weight) // num_ranks) / 2**20
    with CountCommunication() as count:
        sharded.gradients(vocab_size=None, tp_group=group, logits_chunk_mb=two_rows_mb)
    assert count.calls["all_reduce"] > num_rows / 2, "one for each of several chunks, and one at the end"
    assert count.num_bytes == {
        "all_gather": tables * num_ranks * (8 + 16 * num_rows),
        "all_reduce": 4 * num_rows * (numbers + hidden),
    }


def check_all_splits():
    """What each process does."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([one]) for one in range(WORLD_SIZE)]
    for objective in OBJECTIVES.values():
        check_split(build_scene(objective, seed=2, vocab=19), dist.group.WORLD, vocab_size=None)
    for group in (dist.group.WORLD, pairs[rank // 2], alone[rank]):
        check_split(one_owner_scene(), group, vocab_size=None)
        for objective in ONE_PER_ROUTE:
            check_split(build_scene(objective, seed=2, vocab=19), group, vocab_size=None)
            if objective.kind != "adaptive_kl" and group is not alone[rank]:
                check_volume(objective, group)
            # The same through the compiled operators: float64 is served by their references.
            narrow = build_scene(objective, seed=2, vocab=19).to(torch.float32)
            check_split(narrow, group, vocab_size=None, rtol=1e-6, atol=1e-6)
            # 5 rows on 4 ranks: 2, 2, 1, 0. And whole shards of padding: 9 tokens in 19 rows leave the last rank none.
            check_split(build_scene(objective, seed=3, vocab=5, num_candidates=2), group, vocab_size=None)
            padded = build_scene(objective, seed=3, vocab=9, num_candidates=2)
            garbage = torch.full((10, 5), 9.0, dtype=torch.float64)
            padded = replace(padded, weight=torch.cat([padded.weight, garbage]))
            if padded.scores.lm_head_weight is not None:
                padded = padded.with_scores(lm_head_weight=torch.cat([padded.scores.lm_head_weight, garbage]))
            check_split(padded, group, vocab_size=9)
    refuses_a_teacher_that_is_split_elsewhere(dist.group.WORLD)


def refuses_a_teacher_that_is_split_elsewhere(group):
    """On every rank alike, so that none waits for the others."""
    scene = build_scene(Objective("reverse_kl", support="dense"), seed=4)
    wider = torch.cat([scene.scores.lm_head_weight, scene.scores.lm_head_weight])
    sharded = replace(scene, weight=split(scene.weight, group)).with_scores(lm_head_weight=split(wider, group))
    with pytest.raises(ValueError, match="tokens begin at"):
        sharded.loss(vocab_size=19, tp_group=group)


@pytest.mark.slow
def test_split_among_1_2_and_4_processes(tmp_path):
    run_world(check_all_splits, size=WORLD_SIZE, folder=tmp_path)
