"""vLLM in processes of its own: answers while weights change, samples come and go, and it dies."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import weight_cases
from tests.engines import vllm_cases as cases
from tests.engines.writing import VOCAB_SIZE, make_samples
from tests.helpers.vllm import CPU, make_student, needs_vllm, recomputed_logprobs, rollout_config
from titan_opd.config.schema import RolloutConfig, RolloutVllmConfig, SamplingConfig
from titan_opd.data.records import Trajectory
from titan_opd.models import Decoder
from titan_opd.parallel import open_world
from titan_opd.rollout import NativeEngine, Recording
from titan_opd.rollout.vllm_stream import VllmStream
from titan_opd.weights.errors import LayoutError, VerificationError

pytestmark = needs_vllm
LONG = SamplingConfig(max_new_tokens=100)
SHORT = SamplingConfig(temperature=0.7, max_new_tokens=12)


def make_stream(
    decoder: Decoder, *, recompute_kv: bool = True, draws: bool = True, config: RolloutConfig | None = None
) -> VllmStream:
    """Nothing ends an answer but its length, so that there is time for an update."""
    return VllmStream(
        decoder.config,
        config=config or rollout_config(),
        stop_ids=[],
        vocab_size=VOCAB_SIZE,
        max_prompt_tokens=16,
        max_new_tokens=100,
        seed=0,
        draws=draws,
        recompute_kv=recompute_kv,
        device=CPU,
    )


@pytest.fixture(scope="module")
def student() -> Decoder:
    return make_student("llama, tied", seed=0)


@dataclass(frozen=True)
class Running:
    """An engine, and what it said before its first weights. A start takes half a minute, so tests share it."""

    stream: VllmStream
    was_serving: bool
    refusal: str


@contextmanager
def start(student: Decoder, **options: bool) -> Iterator[Running]:
    stream = make_stream(student, **options)
    try:
        was_serving = stream.is_serving
        with pytest.raises(ValueError) as refusal:  # noqa: PT011 (a test looks at the text)
            stream.submit(make_samples(1), SHORT)
        yield Running(stream, was_serving, str(refusal.value))
    finally:
        stream.close()


@pytest.fixture(scope="module")
def running(student: Decoder) -> Iterator[Running]:
    with start(student) as running:
        yield running


@pytest.fixture(scope="module")
def plain(student: Decoder) -> Iterator[Running]:
    """It keeps its cache over an update, and makes no records of draws."""
    with start(student, recompute_kv=False, draws=False) as running:
        yield running


@pytest.fixture
def stream(student: Decoder, running: Running) -> VllmStream:
    """With the student's weights and nothing to do, whatever the test before has left."""
    stream = running.stream
    stream.cancel(range(1000))
    stream.load_weights(student.named_parameters(), stream.policy_version + 1)
    return stream


def wait_for_tokens(stream: VllmStream, count: int) -> None:
    """Until each running sequence has as many tokens."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        written = stream._process.numbers_written().values()
        if written and min(written) >= count:
            return
        time.sleep(0.001)
    raise AssertionError(f"no {count} tokens after a minute")


def finish(stream: VllmStream) -> list[Trajectory]:
    answers = []
    while stream.num_running:
        answers += stream.step()
    return sorted(answers, key=lambda answer: answer.sample.number)


def test_nothing_is_written_before_the_first_weights(running: Running) -> None:
    assert not running.was_serving
    assert "given no weights yet" in running.refusal


def test_logprobs_and_candidates_are_of_the_distribution_sampled_from(student: Decoder, stream: VllmStream) -> None:
    answers = stream.generate(make_samples(12), SHORT, Recording(top_k=5))
    for answer, expected in zip(answers, recomputed_logprobs(student, answers, temperature=0.7), strict=True):
        torch.testing.assert_close(answer.behavior_logprobs, expected, atol=1e-4, rtol=0)
        assert answer.topk_ids.shape == (len(answer.response_ids), 5)
        assert answer.policy_versions.unique().tolist() == [stream.policy_version]
        assert answer.kv_versions is None
        assert answer.finish_reason == "length"


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_own_draws_are_the_native_engines(student: Decoder, stream: VllmStream, top_p: float) -> None:
    sampling, recording = SamplingConfig(top_p=top_p, max_new_tokens=20), Recording(num_samples=5)
    native = NativeEngine(
        student, config=rollout_config(), stop_ids=[], vocab_size=VOCAB_SIZE, max_prompt_tokens=16, seed=0
    )
    samples = make_samples(12)
    for mine, other in zip(
        stream.generate(samples, sampling, recording), native.generate(samples, sampling, recording), strict=True
    ):
        assert torch.equal(mine.sampled_ids, other.sampled_ids)
        torch.testing.assert_close(mine.sampled_logprobs, other.sampled_logprobs, atol=1e-4, rtol=0)
        assert (mine.behavior_support is None) == (other.behavior_support is None) == (top_p == 1.0)


@pytest.mark.parametrize("recording", [Recording(), Recording(num_samples=3)], ids=["vLLM draws", "own draws"])
def test_after_an_update_in_flight_every_token_is_the_new_models(
    student: Decoder, stream: VllmStream, recording: Recording
) -> None:
    new = make_student("llama, tied", seed=1)
    old_version = stream.policy_version
    stream.submit(make_samples(8), LONG, recording)
    wait_for_tokens(stream, 10)
    stream.load_weights(new.named_parameters(), old_version + 3)
    answers = finish(stream)
    assert len(answers) == 8
    by_old, by_new = recomputed_logprobs(student, answers), recomputed_logprobs(new, answers)
    for answer, old_N, new_N in zip(answers, by_old, by_new, strict=True):
        assert len(answer.response_ids) == 100
        is_old_N = answer.policy_versions == old_version
        assert 10 <= int(is_old_N.sum()) < 100
        assert torch.equal(is_old_N, is_old_N.sort(descending=True, stable=True).values)
        assert answer.policy_versions[~is_old_N].unique().tolist() == [old_version + 3]
        torch.testing.assert_close(answer.behavior_logprobs, torch.where(is_old_N, old_N, new_N), atol=1e-4, rtol=0)
        assert answer.kv_versions is None


def test_an_old_cache_is_told(student: Decoder, plain: Running) -> None:
    """The tokens after the update are of a mixture, and `kv_versions` says of which oldest version."""
    stream = plain.stream
    stream.load_weights(student.named_parameters(), 0)
    stream.submit(make_samples(4), LONG)
    wait_for_tokens(stream, 10)
    new = make_student("llama, tied", seed=1)
    stream.load_weights(new.named_parameters(), 1)
    (later,) = make_samples(9)[8:]
    stream.submit([later], LONG)
    answers = finish(stream)
    by_new = recomputed_logprobs(new, answers)
    for answer, new_N in zip(answers[:4], by_new, strict=False):
        is_new_N = answer.policy_versions == 1
        assert 0 < int(is_new_N.sum()) < 100
        assert answer.kv_versions.tolist() == [0] * 100
        assert float((answer.behavior_logprobs - new_N)[is_new_N].abs().max()) > 0.01
    assert answers[4].kv_versions is None
    torch.testing.assert_close(answers[4].behavior_logprobs, by_new[4], atol=1e-4, rtol=0)


def test_records_that_nobody_makes_are_refused(student: Decoder, plain: Running) -> None:
    plain.stream.load_weights(student.named_parameters(), plain.stream.policy_version)
    with pytest.raises(ValueError, match="draws = True"):
        plain.stream.submit(make_samples(1), SHORT, Recording(num_samples=2))


def test_samples_come_and_go(stream: VllmStream) -> None:
    samples = make_samples(12)
    assert stream.free_capacity == 8
    stream.submit(samples[:6], LONG)
    assert (stream.num_running, stream.num_waiting, stream.free_capacity) == (6, 0, 2)
    with pytest.raises(ValueError, match="share the numbers"):
        stream.submit(samples[5:8], LONG)
    with pytest.raises(ValueError, match="step until none is left"):
        stream.submit(samples[6:8], SHORT)
    dropped = stream.cancel([0, 3, 77])
    assert sorted(sample.number for sample in dropped) == [0, 3]
    stream.submit([*dropped, *samples[6:]], LONG)
    assert (stream.num_running, stream.num_waiting, stream.free_capacity) == (8, 4, 0)
    answers = finish(stream)
    assert [answer.sample.number for answer in answers] == list(range(12))
    assert stream.cancel(range(12)) == []


def test_an_answer_that_ended_can_still_be_cancelled(stream: VllmStream) -> None:
    samples = make_samples(3)
    stream.submit(samples, SHORT)
    end = time.monotonic() + 60
    while stream._ended.qsize() < 3 and time.monotonic() < end:
        time.sleep(0.01)
    assert [sample.number for sample in stream.cancel([1])] == [1]
    assert [answer.sample.number for answer in finish(stream)] == [0, 2]


def test_an_update_that_breaks_off_stops_writing_until_a_complete_one(
    student: Decoder, stream: VllmStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_opd.rollout.vllm_weights.BUCKET_BYTES", 10_000)
    version = stream.policy_version
    stream.submit(make_samples(4), LONG)
    wait_for_tokens(stream, 5)

    def breaks_off() -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, tensor) in enumerate(student.named_parameters()):
            if index == 8:
                raise ConnectionError("the trainer is gone")
            yield name, torch.zeros_like(tensor)

    with pytest.raises(ConnectionError):
        stream.load_weights(breaks_off(), version + 1)
    assert not stream.is_serving
    with pytest.raises(ValueError, match="incomplete weight update"):
        stream.step()
    stream.load_weights(student.named_parameters(), version + 2)
    answers = finish(stream)
    assert len(answers) == 4
    for answer, expected in zip(answers, recomputed_logprobs(student, answers), strict=True):
        torch.testing.assert_close(answer.behavior_logprobs, expected, atol=1e-4, rtol=0)
        assert answer.policy_versions.unique().tolist() == [version, version + 2]


def test_a_wrong_name_leaves_the_old_version_in_service(student: Decoder, stream: VllmStream) -> None:
    version = stream.policy_version
    with pytest.raises(ValueError, match="no parameter for"):
        stream.load_weights([("model.extra", torch.ones(2))], version + 1)
    assert stream.is_serving
    assert stream.policy_version == version
    assert len(stream.generate(make_samples(2), SHORT)) == 2


def test_no_weights_stay_in_shared_memory(stream: VllmStream) -> None:
    assert not list(Path("/dev/shm").glob(f"{Path(stream._process.bucket.path).name}*"))


# ---- From a trainer, by every transport ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer(student: Decoder) -> cases.Trainer:
    """Of one process, this one. Its group stays: vLLM keeps groups of it for as long as the process lives."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with open_world() as world:
        return cases.Trainer(make_student("llama, tied", seed=2), world, cases.LAYOUTS["1x1"])


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on the file system in memory."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="titan-opd-test-"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("transport", ["in_process", "shared_memory", "channel", "process_group"])
def test_an_updated_engine_equals_a_fresh_one(
    trainer: cases.Trainer, stream: VllmStream, transport: str, memory: Path, tmp_path: Path
) -> None:
    before = cases.read(stream)
    with cases.published(trainer, transport, memory) as ends:
        for step in range(2):
            trainer.step(step)
            ends.update(stream)
            assert ends.receiver.transport == transport
            now, fresh = cases.read(stream), cases.read_fresh(trainer.export(tmp_path / str(step)))
            assert now.tokens == fresh.tokens
            assert now.gap(fresh) <= 1e-5
            assert now.gap(before) > 0.01
            before = now


# ---- Faults on the way -----------------------------------------------------------------------------------------------


def assert_poisoned(stream: VllmStream) -> None:
    assert not stream.is_serving
    with pytest.raises(ValueError, match="incomplete weight update"):
        stream.submit(make_samples(1), SHORT)


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ({"num_hidden_layers": 1}, "9 of 20 parameters are missing: 'model.layers.1."),
        (
            {"intermediate_size": 56},
            r"'model.layers.0.mlp.gate_proj.weight' is of shape \[56, 32\], the engine's \[48, 32",
        ),
    ],
    ids=["a name missing", "a shape wrong"],
)
def test_weights_of_another_model_leave_the_old_version_in_service(
    trainer: cases.Trainer, stream: VllmStream, memory: Path, shape: dict[str, int], complaint: str
) -> None:
    version, before = stream.policy_version, cases.read(stream)
    other = make_student("llama, tied", seed=1, **shape)
    with (
        cases.published(trainer, "shared_memory", memory, student=other) as ends,
        pytest.raises(LayoutError, match=complaint),
    ):
        ends.update(stream)
    assert (stream.is_serving, stream.policy_version) == (True, version)
    assert cases.read(stream).tokens == before.tokens


@pytest.mark.parametrize("place", ["between trainer and engine", "between engine and vLLM"])
def test_a_byte_flipped_in_shared_memory_is_found(
    trainer: cases.Trainer,
    stream: VllmStream,
    memory: Path,
    tmp_path: Path,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream.submit(make_samples(2), LONG)
    bucket = stream._process.bucket

    def fill(pieces: list) -> Iterator[list]:
        for layout in type(bucket).fill(bucket, pieces):
            name, _, _, begin = layout[0]
            bucket._bytes[begin + 5] ^= 1 << 2 if name == "model.embed_tokens.weight" else 0
            yield layout

    with cases.published(trainer, "shared_memory", memory) as ends:
        ends.publish(stream.policy_version + 1)
        if place == "between trainer and engine":
            ends.flip_byte(memory)
        else:
            monkeypatch.setattr(bucket, "fill", fill)
        with pytest.raises(VerificationError, match=r"1 of 20 .*'model.embed_tokens.weight' differs"):
            ends.take(stream)
        assert_poisoned(stream)
        with pytest.raises(ValueError, match="incomplete weight update"):  # and nothing of what was being written
            stream.step()
        monkeypatch.undo()
        ends.update(stream)
    assert len(finish(stream)) == 2
    assert cases.read(stream).gap(cases.read_fresh(trainer.export(tmp_path / "repaired"))) <= 1e-5


# ---- Two workers for one engine --------------------------------------------------------------------------------------


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_workers_share_one_engine(trainer: cases.Trainer, memory: Path, tmp_path: Path) -> None:
    """Tensor parallelism; the vocabulary of 101 tokens does not divide."""
    options = RolloutVllmConfig(kv_cache_mb=64, tensor_parallel_size=2)
    student = make_student("llama, tied", seed=1)
    stream = make_stream(student, config=rollout_config(vllm=options))
    try:
        stream.load_weights(student.named_parameters(), 0)
        for recording in (Recording(top_k=3), Recording(num_samples=3)):
            answers = stream.generate(make_samples(6), SHORT, recording)
            for answer, expected in zip(answers, recomputed_logprobs(student, answers, temperature=0.7), strict=True):
                torch.testing.assert_close(answer.behavior_logprobs, expected, atol=1e-4, rtol=0)
        for transport in ("shared_memory", "channel"):
            with cases.published(trainer, transport, memory) as ends:
                trainer.step(5)
                ends.update(stream)
                now, fresh = cases.read(stream), cases.read_fresh(trainer.export(tmp_path / transport))
                assert now.tokens == fresh.tokens
                assert now.gap(fresh) <= 1e-5
    finally:
        stream.close()


# ---- Deaths, which end the engines that the tests above share --------------------------------------------------------


def kill_worker(stream: VllmStream) -> None:
    (pid,) = stream._process.run(stream._process.llm.collective_rpc("process_number"))
    os.kill(pid, signal.SIGKILL)


def test_its_death_is_an_error_of_step(student: Decoder, stream: VllmStream) -> None:
    stream.submit(make_samples(4), LONG)
    kill_worker(stream)
    with pytest.raises(RuntimeError, match=r"(?i)engine"):
        finish(stream)


def test_its_death_in_the_middle_of_an_update_is_an_error_of_the_update(
    trainer: cases.Trainer, plain: Running, memory: Path
) -> None:
    """A worker that is told of it ends, and is started anew with an engine that knows no weights."""
    stream = plain.stream
    with cases.published(trainer, "shared_memory", memory) as ends:
        ends.publish(stream.policy_version + 1)
        dying = weight_cases.Dying(stream, on_write=2, action=lambda: kill_worker(stream))
        with pytest.raises(RuntimeError, match="vLLM's processes have died"):
            ends.take(dying)
    assert_poisoned(stream)
