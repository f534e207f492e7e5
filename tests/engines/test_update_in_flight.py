"""New weights while answers are being written: which version computed what, held against passes without a cache."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.test_streaming import by_number, drain
from tests.engines.writing import STOP_IDS, make_decoder, make_engine, make_samples, recomputed_logits
from titan_opd.config.schema import SamplingConfig
from titan_opd.rollout import stream as stream_module

SAMPLING = SamplingConfig(max_new_tokens=10)
NUM_VERSIONS = 4


@pytest.fixture(scope="module")
def policies():
    """A decoder for each version. In float64, so that 1e-5 tells a version from another and not a rounding."""
    return [make_decoder(seed=seed).double() for seed in range(NUM_VERSIONS)]


def weights(decoder) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in decoder.named_parameters()}


def make_updated_engine(**options):
    return make_engine(make_decoder(seed=0).double(), **options)


class GrowingAttention:
    """Keys and values of one sequence, appended as tokens come; whatever weights made them, they stay."""

    def __init__(self, num_layers):
        self.keys, self.values = [[] for _ in range(num_layers)], [[] for _ in range(num_layers)]

    def __call__(self, layer, query_TND, key_TMD, value_TMD):
        self.keys[layer].append(key_TMD)
        self.values[layer].append(value_TMD)
        groups = query_TND.shape[1] // key_TMD.shape[1]
        keys, values = (torch.cat(x[layer]).repeat_interleave(groups, 1) for x in (self.keys, self.values))
        scores = torch.einsum("tnd,snd->nts", query_TND, keys) / query_TND.shape[-1] ** 0.5
        num_new, num_all = scores.shape[1:]
        later = torch.arange(num_all) > torch.arange(num_all - num_new, num_all)[:, None]
        return torch.einsum("nts,snd->tnd", scores.masked_fill(later, -torch.inf).softmax(-1), values)


@torch.no_grad()
def logprobs_with_the_old_cache(policies, answer):
    """[N] by one pass over the prompt and one for each token, all of them with the weights of the token's version."""
    attention = GrowingAttention(policies[0].config.num_layers)
    given_ids, num_seen, logprobs = answer.prompt.token_ids, 0, []
    for token, version in zip(answer.response_ids, answer.policy_versions.tolist(), strict=True):
        positions = torch.arange(num_seen, num_seen + len(given_ids))
        hidden = policies[version](given_ids, positions, attention)
        logits = F.linear(hidden[-1], policies[version].lm_head_weight)
        logprobs.append(logits.log_softmax(-1)[token])
        num_seen += len(given_ids)
        given_ids = token[None]
    return torch.stack(logprobs).float()


def logprobs_of_one_policy_a_token(policies, answer):
    """[N] by a whole pass without a cache for each version."""
    rows = [recomputed_logits(policy, [answer])[0].log_softmax(-1) for policy in policies]
    chosen = torch.stack([rows[version][i] for i, version in enumerate(answer.policy_versions.tolist())])
    return chosen.gather(1, answer.response_ids[:, None]).squeeze(1).float()


EVENTS = st.lists(
    st.one_of(
        st.just("step"),
        st.just("step"),
        st.just("update"),
        st.tuples(st.just("submit"), st.integers(1, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 8)),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(
    events=EVENTS, recompute_kv=st.booleans(), fixed_shapes=st.booleans(), prefill_tokens=st.sampled_from([5, 20, 8192])
)
def test_every_token_is_of_the_version_that_it_names(policies, events, recompute_kv, fixed_shapes, prefill_tokens):
    """Whenever updates come, sequences join and leave: held against a bookkeeping of who ran in which step."""
    engine = make_updated_engine(max_concurrent=3, recompute_kv=recompute_kv, fixed_shapes=fixed_shapes)
    to_submit, in_flight, answers = make_samples(9), {}, {}  # in_flight: versions of the tokens written, by number

    def step():
        finished = by_number(engine.step())
        answers.update(finished)
        for number, answer in finished.items():
            expected = in_flight.pop(number)
            # It joined with some step after it was submitted, and has had a token in each step since.
            num_tokens = len(answer.response_ids)
            assert answer.policy_versions.tolist() == [*expected, engine.policy_version][-num_tokens:]
        for versions in in_flight.values():
            versions.append(engine.policy_version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "PREFILL_TOKENS", prefill_tokens)
        for event in events:
            if event == "step":
                step()
            elif event == "update":
                version = min(engine.policy_version + 1, NUM_VERSIONS - 1)
                engine.load_weights(weights(policies[version]), version)
            elif event[0] == "submit":
                group, to_submit = to_submit[: event[1]], to_submit[event[1] :]
                engine.submit(group, SAMPLING)
                in_flight.update((sample.number, []) for sample in group)
            else:
                dropped = engine.cancel([event[1]])
                assert [sample.number for sample in dropped] == [n for n in [event[1]] if n in in_flight]
                in_flight.pop(event[1], None)
            assert engine.num_running + engine.num_waiting == len(in_flight)
        while in_flight:
            step()

    for answer in answers.values():
        reference = logprobs_of_one_policy_a_token if recompute_kv else logprobs_with_the_old_cache
        torch.testing.assert_close(answer.behavior_logprobs, reference(policies, answer), atol=1e-5, rtol=0)
        versions = answer.policy_versions
        if recompute_kv or versions[0] == versions[-1]:
            assert answer.kv_versions is None
        else:  # the prompt's keys and values are the oldest
            assert answer.kv_versions.dtype == torch.int32
            assert answer.kv_versions.tolist() == [int(versions[0])] * len(versions)


@pytest.mark.parametrize("recompute_kv", [True, False])
def test_an_update_changes_the_rest_of_an_answer(policies, recompute_kv):
    """The two kinds differ from each other, from no update, and from an answer of the new policy alone."""

    def write(*, update_after=None, recompute_kv=recompute_kv):
        engine = make_updated_engine(recompute_kv=recompute_kv, stop_ids=())
        engine.submit(make_samples(4), SAMPLING)
        answers = []
        for number in range(SAMPLING.max_new_tokens):
            if number == update_after:
                engine.load_weights(weights(policies[1]), 1)
            answers += engine.step()
        return by_number(answers)

    updated, kept, other = write(update_after=4), write(), write(update_after=4, recompute_kv=not recompute_kv)
    for number, answer in updated.items():
        assert answer.policy_versions.tolist() == [0] * 4 + [1] * 6
        assert torch.equal(answer.behavior_logprobs[:4], kept[number].behavior_logprobs[:4])
        assert not torch.allclose(answer.behavior_logprobs[4:], kept[number].behavior_logprobs[4:], atol=1e-2)
        assert not torch.allclose(answer.behavior_logprobs[4:], other[number].behavior_logprobs[4:], atol=1e-3)


def test_the_cache_is_rebuilt_in_passes_of_bounded_size_once(policies, monkeypatch):
    engine = make_updated_engine(max_concurrent=6, stop_ids=())
    samples = make_samples(6)
    engine.submit(samples, SAMPLING)
    for _ in range(3):
        engine.step()
    seen = []
    decoder = engine._decoder
    forward = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda ids, *rest: seen.append(len(ids)) or forward(ids, *rest))
    monkeypatch.setattr(stream_module, "PREFILL_TOKENS", 20)
    for version in (1, 2):  # two updates between two steps are one rebuilding
        engine.load_weights(weights(policies[version]), version)
    assert seen == []
    engine.step()
    lengths = [len(sample.prompt.token_ids) + 2 for sample in samples]  # the third token is the step's own input
    assert seen.pop() == 6
    assert sum(seen) == sum(lengths)
    assert 1 < len(seen) < 6
    assert max(seen) <= 20
    seen.clear()
    engine.step()
    assert seen == [6]


def test_a_poisoned_engine_keeps_its_sequences_for_a_complete_update(policies):
    engine, samples = make_updated_engine(max_concurrent=2, stop_ids=()), make_samples(4)
    engine.submit(samples[:3], SAMPLING)
    for _ in range(4):
        engine.step()
    before = engine.num_running, engine.num_waiting

    def half():
        yield from list(weights(policies[1]).items())[:7]
        raise ConnectionError("the trainer is gone")

    with pytest.raises(ConnectionError):
        engine.load_weights(half(), version=1)
    for call in (engine.step, lambda: engine.submit(samples[3:], SAMPLING), lambda: engine.submit([], SAMPLING)):
        with pytest.raises(ValueError, match=r"incomplete weight update \(to version 1: the trainer is gone"):
            call()
    assert (engine.num_running, engine.num_waiting) == before
    assert engine.policy_version == 0
    assert engine.cancel([2]) == [samples[2]]  # leases can still be given back
    engine.load_weights(weights(policies[2]), version=2)
    for answer in drain(engine):
        assert answer.policy_versions.tolist() == [0] * 4 + [2] * 6
        expected = logprobs_of_one_policy_a_token(policies, answer)
        torch.testing.assert_close(answer.behavior_logprobs, expected, atol=1e-5, rtol=0)


def test_an_update_refused_before_the_first_copy_disturbs_nothing(policies):
    written = []
    for interrupt in (False, True):
        engine = make_updated_engine(stop_ids=STOP_IDS)
        engine.submit(make_samples(4), SAMPLING)
        answers = engine.step() + engine.step()
        if interrupt:
            incomplete = weights(policies[1])
            del incomplete["model.norm.weight"]
            for source in (incomplete, iter([])):
                with pytest.raises(ValueError, match="lack"):
                    engine.load_weights(source, version=1)
            with pytest.raises(ValueError, match="version -1 offered"):
                engine.load_weights(weights(policies[1]), version=-1)
        written.append(by_number(answers + drain(engine)))
    for number, answer in written[0].items():
        assert torch.equal(answer.response_ids, written[1][number].response_ids)
        assert torch.equal(answer.behavior_logprobs, written[1][number].behavior_logprobs)
        assert written[1][number].policy_versions.unique().tolist() == [0]


@pytest.mark.parametrize("recompute_kv", [True, False])
def test_storage_stays_in_place_while_sequences_run(policies, recompute_kv):
    decoder = make_decoder(seed=0).double()
    engine = make_engine(decoder, recompute_kv=recompute_kv)
    storage = {name: value.data_ptr() for name, value in decoder.named_parameters()}
    engine.submit(make_samples(3), SAMPLING)
    engine.step()
    engine.load_weights(weights(policies[1]), version=1)
    drain(engine)
    assert storage == {name: value.data_ptr() for name, value in decoder.named_parameters()}
