from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.make import make_prompt
from titan_opd.data import PromptStream

PROMPTS = [make_prompt(f"p{i}", [i]) for i in range(7)]


def make_stream(*, shuffle=True, seed=3, samples_per_prompt=2, prompts=PROMPTS):
    return PromptStream(prompts, shuffle=shuffle, seed=seed, samples_per_prompt=samples_per_prompt)


def facts(samples):
    return [(sample.number, sample.epoch, sample.repeat, sample.prompt.id) for sample in samples]


@settings(max_examples=60, deadline=None)
@given(
    num_prompts=st.integers(1, 7),
    samples_per_prompt=st.integers(1, 4),
    bites=st.lists(st.integers(0, 11), max_size=12),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_any_cut_equals_the_uncut_stream(num_prompts, samples_per_prompt, bites, shuffle, seed):
    def fresh():
        prompts = PROMPTS[:num_prompts]
        return make_stream(prompts=prompts, samples_per_prompt=samples_per_prompt, shuffle=shuffle, seed=seed)

    whole = facts(fresh().take(sum(bites)))
    stream, taken = fresh(), []
    for bite in bites:
        state = stream.state_dict()
        stream = fresh()
        stream.load_state_dict(state)
        taken += facts(stream.take(bite))
    assert taken == whole
    assert [number for number, *_ in whole] == list(range(len(whole)))


@settings(max_examples=60, deadline=None)
@given(num_prompts=st.integers(1, 7), samples_per_prompt=st.integers(1, 4), seed=st.integers(0, 2**40))
def test_an_epoch_passes_over_each_prompt_once_with_its_samples_in_a_row(num_prompts, samples_per_prompt, seed):
    prompts = PROMPTS[:num_prompts]
    stream = make_stream(prompts=prompts, samples_per_prompt=samples_per_prompt, seed=seed)
    for epoch in range(3):
        samples = stream.take(num_prompts * samples_per_prompt)
        assert {sample.epoch for sample in samples} == {epoch}
        groups = [samples[i : i + samples_per_prompt] for i in range(0, len(samples), samples_per_prompt)]
        assert all(len({sample.prompt.id for sample in group}) == 1 for group in groups)
        assert all([sample.repeat for sample in group] == list(range(samples_per_prompt)) for group in groups)
        assert sorted(group[0].prompt.id for group in groups) == [prompt.id for prompt in prompts]


def order(stream, epochs):
    ids = [sample.prompt.id for sample in stream.take(epochs * len(PROMPTS))]
    return [tuple(ids[i : i + len(PROMPTS)]) for i in range(0, len(ids), len(PROMPTS))]


def test_the_order_changes_with_seed_and_epoch():
    orders = [order(make_stream(seed=seed, samples_per_prompt=1), 2) for seed in (0, 1)]
    assert len(set(itertools.chain(*orders))) == 4


def test_without_shuffling_the_order_of_the_file_stays():
    assert order(make_stream(shuffle=False, samples_per_prompt=1), 2) == [tuple(prompt.id for prompt in PROMPTS)] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, "seed was 3 and is now 4"),
        ({"shuffle": False}, "shuffle was True and is now False"),
        ({"samples_per_prompt": 1}, "samples_per_prompt was 2 and is now 1"),
        ({"prompts": PROMPTS[:6]}, "num_prompts was 7 and is now 6"),
        ({"prompts": [*PROMPTS[:6], make_prompt("p6", [8])]}, "prompts_digest was"),
    ],
)
def test_resuming_another_stream_is_refused(change, message):
    with pytest.raises(ValueError, match=f"cannot resume the stream of prompts: {message}"):
        make_stream(**change).load_state_dict(make_stream().state_dict())


def test_a_stream_needs_prompts():
    with pytest.raises(ValueError, match="no training prompts"):
        make_stream(prompts=[])
