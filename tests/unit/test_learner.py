"""The optimizer step, in float64, against plain PyTorch: full logits, autograd, AdamW written out."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import transformers

from tests.helpers.tiny_models import make_tiny_checkpoint
from tests.helpers.trajectories import make_trajectories
from titan_opd.config import Objective
from titan_opd.config.schema import OptimizerConfig, SamplingConfig
from titan_opd.data import pack
from titan_opd.learner import DistillationModel, Learner, summarize_steps
from titan_opd.losses.reference import reference_per_token
from titan_opd.models import PackedAttention, load_decoder
from titan_opd.optimizer import learning_rate
from titan_opd.parallel import open_world
from titan_opd.teacher import LabelScorer, NativeScorer, TeacherModel

VOCAB_SIZE = 95  # of 101 rows: the rest is padding
NUM_STEPS = 4
OPTIMIZER = OptimizerConfig(
    # A large eps: with a small one AdamW's first steps make a step of full size out of the rounding of a gradient of 0,
    # and transformers rounds its norms and rotary angles to float32.
    learning_rate=3e-3,
    eps=1e-3,
    weight_decay=0.1,
    max_grad_norm=0.1,
    warmup_steps=1,
    decay="linear",
)
OBJECTIVES = {
    "forward_kl": Objective(kind="forward_kl", temperature=0.8),
    "reverse_kl": Objective(kind="reverse_kl"),
    "policy_gradient": Objective(kind="policy_gradient"),
    "cross_entropy": Objective(kind="cross_entropy"),
    "jsd": Objective(kind="jsd", support="dense"),
    "mc_forward_kl": Objective(kind="mc_forward_kl"),
    "m2po": Objective(kind="policy_gradient", correction="m2po", m2_budget=0.02),
    "decoupled": Objective(kind="policy_gradient", correction="decoupled", clip_low=0.01, clip_high=0.01, cap=20.0),
}


@pytest.fixture(scope="module")
def world():
    with open_world() as world:
        yield world


@pytest.fixture(scope="module")
def student_path(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("student"), "llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def teacher_path(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("teacher"), "qwen3", seed=1)


def make_scored(objective, teacher_path, count=12, seed=0):
    trajectories = make_trajectories(count, vocab_size=VOCAB_SIZE, num_samples=3, top_k=6, seed=seed)
    if objective.kind == "cross_entropy":
        return LabelScorer().score(trajectories)
    teacher = load_decoder(teacher_path, dtype=torch.float64)
    settings = {"vocab_size": VOCAB_SIZE, "top_k": 7, "num_samples": 3}
    settings |= {"tokens_per_forward": 64, "logits_chunk_mb": 1.0}
    return NativeScorer(TeacherModel(teacher), objective, **settings).score(trajectories)


def make_learner(path, objective, world, optimizer=OPTIMIZER, sampling=None):
    decoder = load_decoder(path, dtype=torch.float64)
    model = DistillationModel(decoder, vocab_size=VOCAB_SIZE, logits_chunk_mb=0.005)  # 6 rows of logits a chunk
    return Learner(model, objective, optimizer, num_steps=NUM_STEPS, seed=0, world=world, sampling=sampling)


def weights(learner):
    return {name: value.detach().clone() for name, value in learner.model.decoder.named_parameters()}


def assert_same(left, right, atol=1e-9):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=atol, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


class PlainTrainer:
    """The definition: one unpadded sequence at a time, mean over all tokens, clipped, AdamW."""

    def __init__(self, path, objective):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path).double()
        self.model.get_input_embeddings().padding_idx = None  # it would keep the gradient of reading token 0 back
        self.objective = objective
        self.first = {name: torch.zeros_like(value) for name, value in self.model.named_parameters()}
        self.second = {name: torch.zeros_like(value) for name, value in self.model.named_parameters()}
        self.steps = 0

    def logits(self, one):
        """[N, V] that predict the answer's tokens."""
        prompt_ids, response_ids = one.trajectory.prompt.token_ids, one.trajectory.response_ids
        logits = self.model(torch.cat([prompt_ids, response_ids])[None]).logits[0, len(prompt_ids) - 1 : -1]
        return logits[:, :VOCAB_SIZE]

    @torch.no_grad()
    def logprobs(self, scored):
        """[N, K] of all answers' samples."""
        return torch.cat([self.logits(one).log_softmax(-1).gather(1, one.scores.ids) for one in scored])

    def step(self, scored, proximal_logprobs=None):
        logits, teacher_logits = torch.cat([self.logits(one) for one in scored]), None
        (batch,) = pack(scored, 10_000)  # all answers in their order, for the scores' rows one after the other
        scores = dataclasses.replace(batch.scores, proximal_logprobs=proximal_logprobs)
        if self.objective.support == "dense":
            teacher_logits = (scores.hidden @ scores.lm_head_weight.T)[:, :VOCAB_SIZE]
        values = reference_per_token(logits, self.objective, scores, teacher_logits_NV=teacher_logits)
        gradients = torch.autograd.grad(values.mean(), list(self.model.parameters()))
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        rate = learning_rate(self.steps, NUM_STEPS, OPTIMIZER)
        self.steps += 1
        with torch.no_grad():
            for (name, parameter), gradient in zip(self.model.named_parameters(), gradients, strict=True):
                self._adamw(name, parameter, gradient * min(1.0, OPTIMIZER.max_grad_norm / norm), rate)
        return values.mean().item(), norm.item()

    def _adamw(self, name, parameter, gradient, rate):
        beta1, beta2 = OPTIMIZER.betas
        if parameter.ndim > 1:
            parameter.mul_(1 - rate * OPTIMIZER.weight_decay)
        self.first[name].lerp_(gradient, 1 - beta1)
        self.second[name].lerp_(gradient**2, 1 - beta2)
        first = self.first[name] / (1 - beta1**self.steps)
        second = self.second[name] / (1 - beta2**self.steps)
        parameter.sub_(rate * first / (second.sqrt() + OPTIMIZER.eps))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_steps_equal_plain_pytorch_however_the_batch_is_cut(name, student_path, teacher_path, world):
    objective = OBJECTIVES[name]
    plain = PlainTrainer(student_path, objective)
    whole, parts = (make_learner(student_path, objective, world) for _ in range(2))
    proximal_logprobs = None
    for step in range(NUM_STEPS):
        scored = make_scored(objective, teacher_path, seed=step // 2)
        if step % 2 == 0:  # each batch is trained twice: the second time the policy is not the proximal one any more
            one_batch, many_batches = (
                learner.with_proximal_policy(pack(scored, capacity))
                for learner, capacity in ((whole, 10_000), (parts, 30))
            )
            if objective.correction == "decoupled":
                proximal_logprobs = plain.logprobs(scored)
        assert len(one_batch) == 1
        assert len(many_batches) > 3
        metrics = whole.step(one_batch, current_version=0)
        metrics_of_parts = parts.step(many_batches, current_version=0)
        loss, norm = plain.step(scored, proximal_logprobs)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norm, abs=1e-6, rel=1e-6)
        assert metrics["tokens"] == sum(len(one.trajectory.response_ids) for one in scored)
        assert metrics["learning_rate"] == learning_rate(step, NUM_STEPS, OPTIMIZER)
        metrics.pop("effective_sample_share", None), metrics_of_parts.pop("effective_sample_share", None)
        assert metrics == pytest.approx(metrics_of_parts, abs=1e-9)
        if objective.correction in ("m2po", "decoupled"):
            assert (metrics["clipped_share"] > 0) == (objective.correction == "m2po" or step % 2 == 1)
    assert norm > OPTIMIZER.max_grad_norm, "the clip has to bind for this test to see it"
    assert_same(weights(whole), weights(parts))
    assert_same(weights(whole), dict(plain.model.named_parameters()), atol=1e-6)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1e3])
def test_a_clip_that_does_not_bind_changes_nothing(max_grad_norm, student_path, teacher_path, world):
    scored = make_scored(OBJECTIVES["forward_kl"], teacher_path)
    results = []
    for bound in (max_grad_norm, 1e9):
        optimizer = dataclasses.replace(OPTIMIZER, max_grad_norm=bound)
        learner = make_learner(student_path, OBJECTIVES["forward_kl"], world, optimizer)
        learner.step(pack(scored, 40), current_version=0)
        results.append(weights(learner))
    assert_same(*results, atol=0)


def test_tokens_of_weight_0_train_nothing_and_count_nowhere(student_path, teacher_path, world):
    """Masking whole answers, in whole micro-batches or within one, is leaving them out."""
    objective = OBJECTIVES["forward_kl"]
    scored = make_scored(objective, teacher_path)
    kept, masked = scored[:5], scored[5:]

    def with_weights(batch, value):
        return dataclasses.replace(batch, token_weights=torch.full_like(batch.token_weights, value))

    separate = [*pack(kept, 10_000), *[with_weights(batch, 0.0) for batch in pack(masked, 30)]]
    (mixed,) = pack(scored, 10_000)
    num_kept = sum(len(one.trajectory.response_ids) for one in kept)
    mixed.token_weights[num_kept:] = 0

    expected_learner = make_learner(student_path, objective, world)
    expected = expected_learner.step(pack(kept, 10_000), current_version=0)
    for batches in (separate, [mixed], separate[::-1]):
        learner = make_learner(student_path, objective, world)
        assert learner.step(batches, current_version=0) == pytest.approx(expected, abs=1e-9)
        assert_same(weights(learner), weights(expected_learner))


def test_a_step_without_any_token_has_no_gradient(student_path, teacher_path, world):
    learner = make_learner(
        student_path, OBJECTIVES["forward_kl"], world, dataclasses.replace(OPTIMIZER, weight_decay=0.0)
    )
    before = weights(learner)
    (batch,) = pack(make_scored(OBJECTIVES["forward_kl"], teacher_path), 10_000)
    metrics = learner.step(
        [dataclasses.replace(batch, token_weights=torch.zeros_like(batch.token_weights))], current_version=0
    )
    assert (metrics["loss"], metrics["grad_norm"], metrics["tokens"]) == (0, 0, 0)
    assert all(value == value for value in metrics.values()), "a metric is NaN"
    assert_same(weights(learner), before, atol=0)


def test_a_gradient_that_is_not_finite_leaves_the_weights_as_they_were(student_path, teacher_path, world):
    learner = make_learner(student_path, OBJECTIVES["cross_entropy"], world)
    before = weights(learner)
    (batch,) = pack(make_scored(OBJECTIVES["cross_entropy"], teacher_path), 10_000)
    huge = dataclasses.replace(batch, token_weights=batch.token_weights.double() * 1e300)
    with pytest.raises(ValueError, match=r"norm is (inf|nan) in optimizer step 1, .* lower optimizer\.learning_rate"):
        learner.step([huge], current_version=0)
    assert_same(weights(learner), before, atol=0)


def test_weights_scale_a_tokens_share_but_not_the_denominator(student_path, teacher_path, world):
    objective = OBJECTIVES["cross_entropy"]
    (batch,) = pack(make_scored(objective, teacher_path), 10_000)
    losses = []
    for factor in (1.0, 0.5):
        scaled = dataclasses.replace(batch, token_weights=batch.token_weights * factor)
        losses.append(make_learner(student_path, objective, world).step([scaled], current_version=0)["loss"])
    assert losses[1] == pytest.approx(0.5 * losses[0])


def test_stale_tokens_are_discounted_by_the_versions_they_are_behind(student_path, teacher_path, world):
    objective = Objective(kind="cross_entropy", staleness_discount=0.5)
    (batch,) = pack(make_scored(objective, teacher_path), 10_000)
    losses = [
        make_learner(student_path, objective, world).step([batch], current_version=version)["loss"]
        for version in (0, 1, 3)
    ]
    assert losses == pytest.approx([losses[0], losses[0] / 2, losses[0] / 8])
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))


@pytest.mark.parametrize("name", ["forward_kl", "jsd", "policy_gradient"])
def test_the_mismatch_is_of_the_tokens_that_the_present_version_wrote(name, student_path, teacher_path, world):
    objective = OBJECTIVES[name]
    sampling = SamplingConfig(temperature=objective.temperature)
    scored = make_scored(objective, teacher_path)
    for number, one in enumerate(scored):  # the first token of every other answer is older, one answer trains nothing
        one.trajectory.policy_versions[:] = 5
        one.trajectory.policy_versions[: number % 2] = 4
    scored[3] = dataclasses.replace(scored[3], oldest_version=6)
    decoder, gaps = load_decoder(student_path, dtype=torch.float64), []
    for one in scored:
        prompt, response = one.trajectory.prompt.token_ids, one.trajectory.response_ids
        (batch,) = pack(LabelScorer().score([one.trajectory]), 100)
        hidden = decoder(batch.input_ids, batch.positions, PackedAttention(batch.cu_seqlens, batch.max_seqlen))
        logits = hidden[len(prompt) - 1 :] @ decoder.lm_head_weight[:VOCAB_SIZE].T / objective.temperature
        logprobs = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        counts = (one.trajectory.policy_versions == 5) & (one.oldest_version < 6)
        gaps.append((logprobs - one.trajectory.behavior_logprobs)[counts].abs().detach())
    expected = torch.cat(gaps)
    learner = make_learner(student_path, objective, world, sampling=sampling)
    metrics = learner.step(pack(scored, 40), current_version=5)
    assert metrics["mismatch/mean"] == pytest.approx(float(expected.mean()), rel=1e-6)
    assert metrics["mismatch/max"] == pytest.approx(float(expected.max()), rel=1e-6)
    assert "mismatch/mean" not in learner.step(pack(scored, 40), current_version=7)  # nothing is of that version


@pytest.mark.parametrize("sampling", [SamplingConfig(temperature=0.5), SamplingConfig(top_p=0.9), None])
def test_other_distributions_than_the_losses_are_not_compared(sampling, student_path, teacher_path, world):
    objective = Objective(kind="forward_kl")
    learner = make_learner(student_path, objective, world, sampling=sampling)
    metrics = learner.step(pack(make_scored(objective, teacher_path), 100), current_version=0)
    assert not any(name.startswith("mismatch") for name in metrics)


def test_answers_without_logprobs_are_compared_with_nothing(student_path, teacher_path, world):
    objective = OBJECTIVES["cross_entropy"]
    scored = [
        dataclasses.replace(one, trajectory=dataclasses.replace(one.trajectory, behavior_logprobs=None))
        for one in make_scored(objective, teacher_path)
    ]
    learner = make_learner(student_path, objective, world, sampling=SamplingConfig())
    assert "mismatch/mean" not in learner.step(pack(scored, 100), current_version=0)


def test_the_optimizer_steps_of_a_batch_are_one_record():
    steps = [
        {"loss": 1.0, "tokens": 3, "learning_rate": 0.1, "ratio_max": 2.0, "mismatch/mean": 1e-6},
        {"loss": 3.0, "tokens": 5, "learning_rate": 0.2, "ratio_max": 1.0},
    ]
    together = {"loss": 2.0, "tokens": 8, "learning_rate": 0.2, "ratio_max": 2.0, "mismatch/mean": 1e-6}
    assert summarize_steps(steps) == together
    assert summarize_steps(steps[:1]) == steps[0]
