"""vLLM in this process, against the native engine, transformers and the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers

from tests.engines.writing import STOP_IDS, VOCAB_SIZE, make_samples
from tests.helpers.vllm import CPU, SHAPES, make_student, needs_vllm, recomputed_logprobs, rollout_config
from titan_opd.config.schema import RolloutConfig, SamplingConfig
from titan_opd.data.records import Trajectory
from titan_opd.models import Decoder, save_decoder
from titan_opd.rollout import NativeEngine, Recording
from titan_opd.rollout.vllm import VllmEngine
from titan_opd.weights.errors import VerificationError
from titan_opd.weights.pieces import Piece

pytestmark = needs_vllm
GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=12)
WARM = SamplingConfig(temperature=0.7, max_new_tokens=12)
NUCLEUS = SamplingConfig(temperature=0.7, top_k=50, top_p=0.9, max_new_tokens=12)


def make_engine(decoder: Decoder, *, seed: int = 0) -> VllmEngine:
    return VllmEngine(
        decoder.config,
        config=rollout_config(),
        stop_ids=STOP_IDS,
        vocab_size=VOCAB_SIZE,
        max_prompt_tokens=16,
        max_new_tokens=12,
        seed=seed,
        draws=True,
        device=CPU,
    )


def another(decoder: Decoder, *, seed: int) -> Decoder:
    """A model of the same shape with other weights."""
    shape = next(name for name, own in SHAPES.items() if own["model_type"] == decoder.config.family)
    return make_student(shape, seed=seed)


def native_engine(decoder: Decoder, *, seed: int = 0) -> NativeEngine:
    return NativeEngine(
        decoder,
        config=RolloutConfig(max_concurrent=8),
        stop_ids=STOP_IDS,
        vocab_size=VOCAB_SIZE,
        max_prompt_tokens=16,
        seed=seed,
    )


@pytest.fixture(scope="module", params=list(SHAPES))
def pair(request: pytest.FixtureRequest) -> tuple[Decoder, VllmEngine]:
    """A model and an engine that holds it, whatever the test before has put there."""
    decoder = make_student(request.param, seed=0)
    return decoder, make_engine(decoder)


@pytest.fixture
def student(pair: tuple[Decoder, VllmEngine]) -> Decoder:
    return pair[0]


@pytest.fixture
def engine(pair: tuple[Decoder, VllmEngine]) -> VllmEngine:
    decoder, engine = pair
    engine.load_weights(decoder.named_parameters(), engine.policy_version)
    return engine


def test_logprobs_are_those_of_transformers(student: Decoder, engine: VllmEngine, tmp_path: object) -> None:
    save_decoder(student, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for answer in engine.generate(make_samples(6), SamplingConfig(max_new_tokens=12)):
        text = torch.cat([answer.prompt.token_ids, answer.response_ids])
        with torch.no_grad():
            logits = model(text[None]).logits[0, len(answer.prompt.token_ids) - 1 : -1, :VOCAB_SIZE]
        expected = logits.log_softmax(dim=-1).gather(1, answer.response_ids[:, None])[:, 0]
        torch.testing.assert_close(answer.behavior_logprobs, expected, atol=1e-4, rtol=0)


def test_greedy_answers_are_the_native_engines(student: Decoder, engine: VllmEngine) -> None:
    samples = make_samples(10)
    answers = engine.generate(samples, GREEDY)
    for mine, native in zip(answers, native_engine(student).generate(samples, GREEDY), strict=True):
        assert_same_tokens(mine, native)
        assert torch.equal(mine.behavior_logprobs, torch.zeros(len(mine.response_ids)))
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    for answer in answers:
        is_stop = torch.isin(answer.response_ids, torch.tensor(STOP_IDS))
        assert is_stop.sum() == (answer.finish_reason == "stop")
        assert bool(is_stop[-1]) == (answer.finish_reason == "stop")


def test_stop_ids_of_a_request_end_answers_too(engine: VllmEngine) -> None:
    (sample,) = make_samples(1)
    (plain,) = engine.generate([sample], SamplingConfig(temperature=0.0, max_new_tokens=12))
    third = int(plain.response_ids[2])
    first = plain.response_ids.tolist().index(third)
    (stopped,) = engine.generate([sample], replace(GREEDY, stop_ids=(third,)))
    assert stopped.response_ids.tolist() == plain.response_ids[: first + 1].tolist()
    assert stopped.finish_reason == "stop"


def test_logprobs_are_of_the_distribution_sampled_from(student: Decoder, engine: VllmEngine) -> None:
    answers = engine.generate(make_samples(10), WARM, Recording(num_samples=1, top_k=5))
    for answer, expected in zip(answers, recomputed_logprobs(student, answers, temperature=0.7), strict=True):
        torch.testing.assert_close(answer.behavior_logprobs, expected, atol=1e-4, rtol=0)
        assert torch.equal(answer.sampled_ids[:, 0], answer.response_ids)
        assert torch.equal(answer.sampled_logprobs[:, 0], answer.behavior_logprobs)
        assert answer.topk_ids.shape == answer.topk_logprobs.shape == (len(answer.response_ids), 5)
        assert int(answer.topk_ids.max()) < VOCAB_SIZE


def test_recorded_candidates_are_the_native_engines(student: Decoder, engine: VllmEngine) -> None:
    answers = engine.generate(make_samples(6), WARM, Recording(top_k=7))
    for mine, native in zip(answers, native_engine(student).read(answers, WARM, Recording(top_k=7)), strict=True):
        assert torch.equal(mine.topk_ids, native.topk_ids)
        torch.testing.assert_close(mine.topk_logprobs, native.topk_logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("sampling", "recording"),
    [
        (NUCLEUS, Recording()),
        (NUCLEUS, Recording(num_samples=4, top_k=3)),
        (SamplingConfig(max_new_tokens=12), Recording(num_samples=8)),
        (GREEDY, Recording(num_samples=2)),
    ],
    ids=["truncated", "truncated with samples", "samples", "samples at temperature 0"],
)
def test_own_draws_are_the_native_engines(
    student: Decoder, engine: VllmEngine, sampling: SamplingConfig, recording: Recording
) -> None:
    samples = make_samples(10)
    answers = engine.generate(samples, sampling, recording)
    for mine, native in zip(answers, native_engine(student).generate(samples, sampling, recording), strict=True):
        assert_same_tokens(mine, native)
        for name in ("sampled_ids", "topk_ids", "behavior_support"):
            assert_equal_or_none(getattr(mine, name), getattr(native, name))
        for name in ("behavior_logprobs", "sampled_logprobs", "topk_logprobs"):
            mine_value, native_value = getattr(mine, name), getattr(native, name)
            assert (mine_value is None) == (native_value is None)
            if mine_value is not None:
                torch.testing.assert_close(mine_value, native_value, atol=1e-4, rtol=0)


@pytest.mark.parametrize("sampling", [WARM, NUCLEUS], ids=["vLLM draws", "own draws"])
def test_an_answer_depends_on_seed_and_number_only(engine: VllmEngine, sampling: SamplingConfig) -> None:
    samples = make_samples(12)
    together = engine.generate(samples, sampling)
    alone = engine.generate([samples[5]], sampling)[0]
    others = engine.generate(samples[::-1][:9], sampling)
    assert_same_tokens(alone, together[5])
    for answer in others:
        assert_same_tokens(answer, together[answer.sample.number])
    renumbered = engine.generate([replace(samples[5], number=900)], sampling)[0]
    assert renumbered.response_ids.tolist() != alone.response_ids.tolist()


def test_new_weights_are_those_of_a_fresh_engine(student: Decoder, engine: VllmEngine) -> None:
    """A tied output projection has a packed copy, which only a comparison with another engine shows to be stale."""
    new = another(student, seed=7)
    version = engine.policy_version + 1
    engine.load_weights(new.named_parameters(), version)
    fresh = make_engine(new)
    fresh.load_weights(new.named_parameters(), 0)
    samples = make_samples(8)
    recording = Recording(top_k=20)
    answers = engine.generate(samples, WARM, recording)
    for mine, other in zip(answers, fresh.generate(samples, WARM, recording), strict=True):
        assert_same_tokens(mine, other)
        assert torch.equal(mine.topk_ids, other.topk_ids)
        torch.testing.assert_close(mine.topk_logprobs, other.topk_logprobs, atol=1e-6, rtol=0)
        assert mine.policy_versions.unique().tolist() == [version]
    for answer, expected in zip(answers, recomputed_logprobs(new, answers, temperature=0.7), strict=True):
        torch.testing.assert_close(answer.behavior_logprobs, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda weights: weights[:-1], "lack 1 of"),
        (lambda weights: [*weights, ("model.extra", torch.ones(3))], "no parameter for"),
        (lambda weights: [*weights, weights[3]], "twice"),
        (lambda weights: [(weights[0][0], weights[0][1][:-1]), *weights[1:]], "shape"),
    ],
    ids=["missing", "unknown", "twice", "shape"],
)
def test_weights_that_do_not_fit_are_refused_before_a_byte_is_written(
    student: Decoder, engine: VllmEngine, spoil: Callable, complaint: str
) -> None:
    before = engine.generate(make_samples(3), WARM)
    other = another(student, seed=3)
    with pytest.raises(ValueError, match=complaint):
        engine.load_weights(spoil(list(other.named_parameters())), engine.policy_version + 1)
    for mine, old in zip(engine.generate(make_samples(3), WARM), before, strict=True):
        assert_same_tokens(mine, old)


def test_an_update_that_breaks_off_stops_the_engine_until_a_complete_one(
    student: Decoder, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_opd.rollout.vllm_weights.BUCKET_BYTES", 10_000)  # several of them
    before = engine.generate(make_samples(3), WARM)

    def breaks_off() -> object:
        for index, (name, tensor) in enumerate(student.named_parameters()):
            if index == 8:
                raise ConnectionError("the trainer is gone")
            yield name, torch.zeros_like(tensor)

    with pytest.raises(ConnectionError):
        engine.load_weights(breaks_off(), engine.policy_version + 1)
    with pytest.raises(ValueError, match="incomplete weight update"):
        engine.generate(make_samples(1), WARM)
    engine.load_weights(student.named_parameters(), engine.policy_version + 1)
    for mine, old in zip(engine.generate(make_samples(3), WARM), before, strict=True):
        assert_same_tokens(mine, old)


def test_bytes_other_than_those_sent_are_found(
    student: Decoder, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = engine.send

    def damaged(pieces: list[Piece]) -> None:
        other = pieces[-1].tensor.clone()
        other.view(-1)[0] += 1
        send([*pieces[:-1], Piece(pieces[-1].name, 0, other)])

    monkeypatch.setattr(engine, "send", damaged)
    with pytest.raises(VerificationError, match="differs from what was sent"):
        engine.load_weights(student.named_parameters(), engine.policy_version + 1)
    with pytest.raises(ValueError, match="incomplete"):
        engine.generate(make_samples(1), WARM)


def test_pieces_are_whole_parameters_and_the_probe_reads_the_new_weights(student: Decoder, engine: VllmEngine) -> None:
    new = another(student, seed=5)
    ids = torch.arange(1, 33)
    with engine.update_weights(engine.policy_version + 1) as update:
        weights = dict(new.named_parameters())
        update.write([Piece(name, 0, tensor.detach()) for name, tensor in weights.items()])
        update.finish()
        found = update.logprobs(ids)
        assert update.written_digests().keys() == weights.keys()
    sample = make_samples(1)[0]
    sample = replace(sample, prompt=replace(sample.prompt, token_ids=ids[:1]))
    answer = Trajectory(sample, ids[1:], torch.zeros(31, dtype=torch.int32), "stop")
    torch.testing.assert_close(found, recomputed_logprobs(new, [answer])[0], atol=1e-4, rtol=0)
    with (
        pytest.raises(ValueError, match="not whole"),
        engine.update_weights(engine.policy_version + 1) as update,
    ):
        update.write([Piece("model.embed_tokens.weight", 0, torch.zeros(3, 32))])


def test_an_update_of_a_sleeping_engine_wakes_its_weights_first(
    student: Decoder, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What sleep frees only a GPU shows (tests/engines/test_vllm_gpu.py); the calls are the same ones here."""
    calls: list[tuple] = []
    begin = engine._layerwise.begin
    monkeypatch.setattr(engine, "_sleeps", True)
    monkeypatch.setattr(engine, "_awake", set())
    monkeypatch.setattr(engine._llm, "wake_up", lambda tags: calls.append(("wake", *tags)))
    monkeypatch.setattr(engine._llm, "sleep", lambda level: calls.append(("sleep", level)))
    monkeypatch.setattr(engine._layerwise, "begin", lambda: (calls.append(("update",)), begin()))
    engine.load_weights(student.named_parameters(), engine.policy_version + 1)
    assert calls == [("wake", "weights"), ("update",)]
    engine.generate(make_samples(2), WARM)
    assert calls[2:] == [("wake", "kv_cache"), ("sleep", 1)]
    engine.load_weights(student.named_parameters(), engine.policy_version + 1)
    engine.logprobs([1, 2, 3])
    assert calls[4:] == [("wake", "weights"), ("update",), ("wake", "kv_cache")]


def test_a_lower_version_is_refused(student: Decoder, engine: VllmEngine) -> None:
    engine.load_weights(student.named_parameters(), engine.policy_version + 1)
    with pytest.raises(ValueError, match="never falls"):
        engine.load_weights(student.named_parameters(), engine.policy_version - 1)


def test_the_process_is_left_as_it_was(student: Decoder) -> None:
    expected = torch.rand(1, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(5)
    make_engine(student)
    assert torch.equal(torch.rand(1), expected)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)


def assert_same_tokens(left: Trajectory, right: Trajectory) -> None:
    assert left.response_ids.tolist() == right.response_ids.tolist()
    assert left.finish_reason == right.finish_reason


def assert_equal_or_none(left: torch.Tensor | None, right: torch.Tensor | None) -> None:
    assert (left is None) == (right is None)
    if left is not None:
        assert torch.equal(left, right)
