"""What changed, into a real vLLM: it then writes what it writes with the whole tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engines.test_vllm_stream import SHORT, make_stream
from tests.engines.writing import make_samples
from tests.helpers.vllm import make_student, needs_vllm, recomputed_logprobs
from tests.helpers.weights import Ends, nudged
from titan_opd.models import Decoder
from titan_opd.rollout.vllm_stream import VllmStream
from titan_opd.weights.errors import VerificationError
from titan_opd.weights.mirror import MirroredUpdate

pytestmark = needs_vllm


@pytest.fixture(scope="module", params=["llama, tied", "qwen3"])
def student(request: pytest.FixtureRequest) -> Decoder:
    return make_student(request.param, seed=0)


@pytest.fixture(scope="module")
def stream(student: Decoder) -> Iterator[VllmStream]:
    stream = make_stream(student, draws=False)
    yield stream
    stream.close()


def test_changes_write_what_whole_tensors_write(
    student: Decoder, stream: VllmStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ends("channel", tmp_path, dtype=torch.float32, delta=True) as ends:
        receiver = ends.receiver()
        decoders = [student, nudged(student, 0.05, seed=1, only="layers.1"), nudged(student, 0.1, seed=2)]
        for version, decoder in enumerate(decoders, start=1):
            ends.publish(decoder, version)
            receiver.take(stream, ends.store.address, version)
            assert receiver.took_delta is (version > 1)
        by_changes = stream.generate(make_samples(8), SHORT)
        for answer, expected in zip(by_changes, recomputed_logprobs(decoder, by_changes, temperature=0.7), strict=True):
            torch.testing.assert_close(answer.behavior_logprobs, expected, atol=1e-4, rtol=0)
        stream.load_weights(decoder.named_parameters(), 4)
        for answer, whole in zip(by_changes, stream.generate(make_samples(8), SHORT), strict=True):
            assert torch.equal(answer.response_ids, whole.response_ids)
            assert torch.equal(answer.behavior_logprobs, whole.behavior_logprobs)

        receiver = ends.receiver()  # and once more, with a change that is lost on its way
        ends.publish(student, 5)
        receiver.take(stream, ends.store.address, 5)
        ends.publish(decoders[1], 6)
        with monkeypatch.context() as patch:
            patch.setattr(MirroredUpdate, "change", lambda self, changes: self.keep([one.name for one in changes]))
            with pytest.raises(VerificationError, match=r"in the written bytes: .* has not changed"):
                receiver.take(stream, ends.store.address, 6)
        assert not stream.is_serving
        receiver.take(stream, ends.store.address, 6)
        assert not receiver.took_delta
        repaired = stream.generate(make_samples(4), SHORT)
        for answer, expected in zip(repaired, recomputed_logprobs(decoders[1], repaired, temperature=0.7), strict=True):
            torch.testing.assert_close(answer.behavior_logprobs, expected, atol=1e-4, rtol=0)
