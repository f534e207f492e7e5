"""The configuration: read, overridden, refused with a message that helps, printed and read back."""

import dataclasses
import functools
import re
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_opd.config import Config, dump_toml, load_config
from titan_opd.config.document import document
from titan_opd.config.options import field_types

SMALLEST = """
[student]
path = "student"
[teacher]
path = "teacher"
[objective]
kind = "forward_kl"
[training]
steps = 3
[data]
train = "prompts.jsonl"
"""


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(SMALLEST)
    return path


def load(tmp_path, text, overrides=()):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load_config(path, overrides)


def test_defaults_and_values(toml):
    config = load_config(toml)
    assert config.student.path == "student"
    assert config.training.steps == 3
    assert config.schedule.batch == 64


def test_overrides_win_in_both_forms(toml):
    config = load_config(
        toml,
        ["--training.steps", "7", "--run.seed=5", "--rollout.sampling.temperature", "0.5", "--student.path", "3"],
    )
    assert (config.training.steps, config.run.seed, config.rollout.sampling.temperature) == (7, 5, 0.5)
    assert config.student.path == "3"  # a text option takes the text as it is


def test_an_integer_is_a_float_and_a_list_is_a_tuple(tmp_path):
    config = load(tmp_path, SMALLEST + "[optimizer]\nlearning_rate = 1\nbetas = [0.5, 0.9]\n")
    assert config.optimizer.learning_rate == 1.0
    assert isinstance(config.optimizer.learning_rate, float)
    assert config.optimizer.betas == (0.5, 0.9)


def test_a_table_that_names_some_keys_keeps_the_sections_own_defaults(tmp_path):
    config = load(tmp_path, SMALLEST + "[evaluation.sampling]\nmax_new_tokens = 9\n")
    assert config.evaluation.sampling.max_new_tokens == 9
    assert config.evaluation.sampling.temperature == 0.0  # evaluation's default, not SamplingConfig's


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[schedule]\nbatsh = 3\n", r"unknown key 'batsh' in \[schedule\]; did you mean 'batch'\?"),
        ("[scedule]\nbatch = 3\n", "unknown key 'scedule' in the configuration; did you mean 'schedule'"),
        (
            "[schedule]\nmode = 'sink'\n",
            "schedule.mode = 'sink' is not one of 'sync', 'step_off', 'async'; did you mean 'sync'",
        ),
        ("[schedule]\nbatch = 0\n", "schedule.batch = 0 must be at least 1"),
        ("[schedule]\nbatch = '3'\n", "schedule.batch = '3' must be of type int, it is str"),
        ("[schedule]\nbatch = true\n", "schedule.batch = True must be of type int, it is bool"),
        ("[schedule]\nbatch = 10\nminibatches = 3\n", "schedule.minibatches = 3 does not divide schedule.batch = 10"),
        ("[optimizer]\nbetas = [0.9]\n", "optimizer.betas .* must have 2 values, it has 1"),
        ("[optimizer]\nbetas = [0.9, 1.5]\n", r"optimizer.betas\[1\] = 1.5 must be below 1"),
        ("[optimizer]\nbetas = [1, 0.9]\n", r"optimizer.betas\[0\] = 1.0 must be below 1"),
        ("[run]\nseed = 9223372036854775808\n", "run.seed = 9223372036854775808 must fit into 64 bits"),
        ("[parallel]\ntimeout_seconds = 1e300\n", "parallel.timeout_seconds = 1e.300 must be at most 1"),
        ("[rollout.sampling]\nstop_ids = 3\n", "rollout.sampling.stop_ids = 3 must be of type list, it is int"),
        ("[evaluation.sampling]\ntop_p = 0\n", "evaluation.sampling.top_p = 0.0 must be above 0"),
        ("[evaluation.sampling]\ntop_q = 1\n", r"unknown key 'top_q' in \[evaluation.sampling\]; did you mean 'top_p'"),
        ("[evaluation]\nsampling = 3\n", "evaluation.sampling = 3 must be a table"),
        ("[data.arithmetic]\nmin_digits = 5\n", "data.arithmetic.min_digits = 5 is above max_digits = 3"),
    ],
)
def test_a_wrong_key_or_value_is_refused_by_name(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path, SMALLEST + text)
    assert str(tmp_path / "run.toml") in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--schedule.batsh", "3"], "unknown key 'batsh'; did you mean 'batch'"),
        (["--shedule.batch", "3"], "no section 'shedule'; did you mean 'schedule'"),
        (["--rollout.sampler.top_k", "3"], r"no section 'sampler' in \[rollout\]; did you mean 'sampling'"),
        (["--schedule.batch"], "has no value"),
        (["--schedule.batch", "many"], "is not a TOML value"),
        (["--schedule.batch", "9" * 5000], "is not a TOML value"),
        (["--schedule.batch", "3\nminibatches = 3"], "is not a TOML value"),
        (["batch", "3"], "must have the form --section.key value"),
    ],
)
def test_a_wrong_override_is_refused_by_name(toml, overrides, message):
    with pytest.raises(ValueError, match=message):
        load_config(toml, overrides)


def test_a_missing_required_key_says_what_it_is(tmp_path):
    with pytest.raises(ValueError, match=r"training\.steps is missing: batches to train on"):
        load(tmp_path, SMALLEST.replace("steps = 3", ""))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no configuration file"),
        ("a = [", "is not valid TOML"),
        ("a = 1\na = 2", "is not valid TOML"),
        (f"a = {'9' * 5000}", "is not valid TOML"),
        ("a = " + "[" * 100_000, "is not valid TOML"),
    ],
    ids=["no file", "broken", "twice", "digits", "deep"],
)
def test_a_missing_or_broken_file(tmp_path, content, message):
    path = tmp_path / "x.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_config(path)


@pytest.mark.parametrize("name", ["run.toml/x.toml", "n" * 300])
def test_a_path_that_cannot_be_a_file(toml, name):
    with pytest.raises(ValueError, match=r"cannot be read \(.+\); name a TOML file"):
        load_config(toml.parent / name)


def test_a_byte_order_mark_is_passed_over(toml):
    expected = load_config(toml)
    toml.write_bytes(b"\xef\xbb\xbf" + toml.read_bytes())
    assert load_config(toml) == expected


def options_of(section, prefix, kind):
    for field in dataclasses.fields(section):
        found = field_types(section)[field.name]
        if dataclasses.is_dataclass(found):
            yield from options_of(found, f"{prefix}{field.name}.", kind)
        elif kind is found or kind in typing.get_args(found):
            yield f"{prefix}{field.name}", typing.get_origin(found) is tuple


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_no_option_is_a_number_that_is_not_finite(toml, value):
    options = list(options_of(Config, "", float))
    assert len(options) > 20
    for key, is_list in options:
        text = f"[{value}, {value}]" if is_list else value
        with pytest.raises(ValueError, match=r"must be a finite number"):
            load_config(toml, [f"--{key}", text])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('path = "student"', 'path = ""'), "student.path is empty"),
        (('path = "teacher"', ""), "teacher.path is missing"),
        (('path = "teacher"', 'engine = "none"'), "objective.kind = 'forward_kl' needs a teacher"),
        (('kind = "forward_kl"', 'kind = "cross_entropy"'), "set teacher.engine = 'none'"),
        (
            ('path = "teacher"\n[objective]\nkind = "forward_kl"', 'engine="none"\n[objective]\nkind="cross_entropy"'),
            "set rollout.engine = 'answers'",
        ),
        (
            ('kind = "forward_kl"', 'kind = "policy_gradient"\ntemperature = 0.5'),
            "must equal rollout.sampling.temperature",
        ),
        (('train = "prompts.jsonl"', ""), "data.train is missing"),
        (('train = "prompts.jsonl"', 'train = "x"\ntask = "arithmetic"'), "is not read when data.task"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, SMALLEST.replace(*change))


def test_the_resolved_configuration_reads_back_equal(toml, tmp_path):
    config = load_config(toml, ["--run.directory", 'quoted "name" \\ ü', "--optimizer.betas", "[0.1, 0.2]"])
    copy = tmp_path / "copy.toml"
    copy.write_text(dump_toml(config))
    assert load_config(copy) == config


@given(st.floats(min_value=0, max_value=1e6), st.integers(0, 2**40), st.text(min_size=1))
def test_every_value_survives_the_round_trip(tmp_path_factory, rate, seed, name):
    path = tmp_path_factory.mktemp("config") / "run.toml"
    path.write_text(SMALLEST)
    config = load_config(path)
    config = dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, learning_rate=rate),
        run=dataclasses.replace(config.run, seed=seed, directory=name),
    )
    path.write_text(dump_toml(config), newline="")
    assert load_config(path) == config


def test_every_option_is_documented():
    def undocumented(section, prefix):
        for field in dataclasses.fields(section):
            if not field.metadata.get("doc"):
                yield f"{prefix}{field.name}"
            kind = field_types(section)[field.name]
            if dataclasses.is_dataclass(kind):
                yield from undocumented(kind, f"{prefix}{field.name}.")

    assert list(undocumented(Config, "")) == []


def test_the_table_of_options_has_the_defaults_of_a_configuration(toml):
    """A section that is nested in two can have other defaults in each."""
    config = load_config(toml)
    section = ""
    shown = {}
    for line in document().splitlines():
        if line.startswith("## ["):
            section = line[4:-1]
        elif option := re.match(r"\| `(\w+)` \| `(.*?)` \|", line):
            shown[f"{section}.{option[1]}"] = option[2]
    assert len(shown) > 100
    for key, default in shown.items():
        value = functools.reduce(getattr, key.split("."), config)
        value = list(value) if isinstance(value, tuple) else value
        if key not in ("data.train", "teacher.path"):  # set in SMALLEST
            assert default == (str(value).lower() if isinstance(value, bool) else repr(value)), key


def test_the_table_of_options_is_that_of_the_schema():
    file = Path(__file__).parents[3] / "train_configs" / "OPTIONS.md"
    assert file.read_text() == document(), "run: python -m titan_opd.config.document > train_configs/OPTIONS.md"


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[3] / "train_configs").rglob("*.toml")), ids=lambda path: path.name
)
def test_each_configuration_that_is_shipped_can_be_read(path):
    assert load_config(path).training.steps > 0
