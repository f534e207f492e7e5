"""New weights into the native engine: all of them, in place, or an error and no answers."""

from __future__ import annotations

import pytest
import torch

from tests.engines.writing import make_decoder, make_engine, make_samples
from titan_opd.config.schema import SamplingConfig

SAMPLING = SamplingConfig(max_new_tokens=12)


def weights(seed: int, **overrides) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in make_decoder(seed=seed, **overrides).named_parameters()}


def answer(engine) -> list[list[int]]:
    return [trajectory.response_ids.tolist() for trajectory in engine.generate(make_samples(3), SAMPLING)]


def fresh_answer(seed: int, **overrides) -> list[list[int]]:
    return answer(make_engine(make_decoder(seed=seed, **overrides)))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_update_is_in_place_and_complete(tied):
    decoder = make_decoder(seed=0, tie_word_embeddings=tied)
    storage = {name: value.data_ptr() for name, value in decoder.named_parameters()}
    engine = make_engine(decoder)
    assert answer(engine) == fresh_answer(0, tie_word_embeddings=tied)
    engine.load_weights(weights(1, tie_word_embeddings=tied).items(), version=1)
    # Against a fresh engine: going there and back would not show a copy left behind.
    assert answer(engine) == fresh_answer(1, tie_word_embeddings=tied) != fresh_answer(0, tie_word_embeddings=tied)
    assert engine.policy_version == 1
    assert storage == {name: value.data_ptr() for name, value in decoder.named_parameters()}


def test_update_copies_what_it_is_given():
    engine = make_engine(make_decoder(seed=0))
    given = weights(1)
    engine.load_weights(given.items(), version=1)
    for tensor in given.values():
        tensor.zero_()
    assert answer(engine) == fresh_answer(1)


def test_update_casts_floating_types():
    engine = make_engine(make_decoder(seed=0).bfloat16())
    engine.load_weights(weights(1).items(), version=1)
    assert answer(engine) == answer(make_engine(make_decoder(seed=1).bfloat16()))


def test_trajectories_carry_the_version_that_wrote_them():
    engine = make_engine(make_decoder())
    for version in (0, 1, 1, 5):
        engine.load_weights(weights(version).items(), version)
        (trajectory, *_) = engine.generate(make_samples(2), SAMPLING)
        assert trajectory.policy_versions.unique().tolist() == [version]
    with pytest.raises(ValueError, match="version 4 offered to an engine at version 5"):
        engine.load_weights(weights(4).items(), 4)
    assert answer(engine) == fresh_answer(5)


NORM = "model.norm.weight"


def missing_two(given):
    del given[NORM], given["model.layers.1.mlp.up_proj.weight"]
    return given.items()


def unknown_last(given):
    return [*given.items(), ("model.layers.2.mlp.up_proj.weight", given[NORM])]


def twice(given):
    return [*given.items(), (NORM, given[NORM])]


def wrong_shape_last(given):
    norm = given.pop(NORM)
    return [*given.items(), (NORM, norm[:-1])]


def integers_last(given):
    norm = given.pop(NORM)
    return [*given.items(), (NORM, norm.long())]


FAULTS = {
    missing_two: r"lack 2 of 21 parameters: model\.layers\.1\.mlp\.up_proj\.weight, model\.norm\.weight",
    unknown_last: r"'model\.layers\.2\.mlp\.up_proj\.weight', which the engine's model has no parameter for",
    twice: r"'model\.norm\.weight' twice",
    wrong_shape_last: r"shape of 'model\.norm\.weight' is \[31\] in the weights and \[32\] in the engine",
    integers_last: r"'model\.norm\.weight' is of type torch\.int64",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_failed_update_silences_the_engine_until_a_complete_one(fault):
    engine = make_engine(make_decoder(seed=0))
    with pytest.raises(ValueError, match=FAULTS[fault]):
        engine.load_weights(iter(fault(weights(1))), version=1)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"incomplete weight update \(to version 1: .*{FAULTS[fault]}"):
            engine.generate(make_samples(3), SAMPLING)
    assert engine.policy_version == 0
    engine.load_weights(weights(1).items(), version=1)
    assert answer(engine) == fresh_answer(1)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_can_be_seen_as_a_whole_is_checked_before_the_first_copy(fault):
    engine = make_engine(make_decoder(seed=0))
    given = list(fault(weights(1)))
    sources = [given, tuple(given), dict(given).items(), dict(given)]
    for source in sources[: 2 if fault is twice else 4]:  # a dict holds no name twice
        with pytest.raises(ValueError, match=FAULTS[fault]):
            engine.load_weights(source, version=1)
        assert (engine.policy_version, answer(engine)) == (0, fresh_answer(0))


def test_a_mapping_is_an_update():
    engine = make_engine(make_decoder(seed=0))
    engine.load_weights(weights(1), version=1)
    assert (engine.policy_version, answer(engine)) == (1, fresh_answer(1))


def test_a_failure_before_the_first_copy_does_not_heal_one_after_it():
    engine = make_engine(make_decoder(seed=0))
    for source in (iter(missing_two(weights(1))), [], iter([])):
        with pytest.raises(ValueError, match="lack"):
            engine.load_weights(source, version=1)
    with pytest.raises(ValueError, match=r"incomplete weight update \(to version 1: .*lack 2 of 21"):
        engine.generate(make_samples(1), SAMPLING)


def test_a_source_that_breaks_off_silences_the_engine():
    def source():
        yield from list(weights(1).items())[:3]
        raise ConnectionError("the trainer is gone")

    engine = make_engine(make_decoder(seed=0))
    with pytest.raises(ConnectionError):
        engine.load_weights(source(), version=1)
    with pytest.raises(ValueError, match="to version 1: the trainer is gone"):
        engine.generate(make_samples(1), SAMPLING)


@pytest.mark.parametrize("as_iterator", [False, True], ids=["list", "iterator"])
@pytest.mark.parametrize("given", [[], [("lm_head.bias", torch.zeros(1))]], ids=["nothing", "unknown name first"])
def test_an_update_that_fails_before_the_first_copy_leaves_the_old_version_in_service(given, as_iterator):
    engine = make_engine(make_decoder(seed=0))
    with pytest.raises(ValueError, match=r"lack 21 of 21|no parameter for"):
        engine.load_weights(iter(given) if as_iterator else given, version=1)
    assert answer(engine) == fresh_answer(0)


def test_nothing_of_damaged_weights_outlives_them():
    engine = make_engine(make_decoder(seed=0))
    damaged = {name: torch.full_like(value, torch.nan) for name, value in weights(0).items()}
    engine.load_weights(damaged.items(), version=1)
    with pytest.raises(ValueError, match="the weights are damaged"):
        answer(engine)
    engine.load_weights(weights(2).items(), version=2)
    assert answer(engine) == fresh_answer(2)


def test_a_tied_model_has_no_output_projection_of_its_own():
    engine = make_engine(make_decoder(tie_word_embeddings=True))
    with pytest.raises(ValueError, match=r"'lm_head\.weight', which the engine's model has no parameter for"):
        engine.load_weights(weights(1).items(), version=1)
