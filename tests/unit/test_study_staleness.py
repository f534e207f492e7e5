"""The study of staleness: its loop, its verdicts, and the whole script on tiny models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from staleness.protocol import METHODS, SMOKE, Job, Protocol, report_jobs, selection_jobs
from staleness.report import Cell, cells, choose_rates, verdicts
from staleness.runs import Study, train_stale

from tests.helpers.tiny_models import make_tiny_checkpoint
from titan_opd.assemble import assemble
from titan_opd.data.arithmetic import arithmetic_tokenizer
from titan_opd.parallel import open_world

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("student", 0), ("teacher", 1)):
        arithmetic_tokenizer().save_pretrained(folder / name)
        make_tiny_checkpoint(folder / name, seed=seed, vocab_size=20, eos_token_id=1)
    return Study(folder / "study", folder / "teacher", folder / "student", SMOKE)


def steps(study, method, staleness, rate=1e-2):
    config = study.config(Job(method, staleness, rate, seed=1))
    with open_world() as world:
        return train_stale(config, assemble(config, world), world, staleness)


# The loop


@pytest.mark.parametrize("staleness", [0, 1, 3, 9])
def test_answers_are_exactly_as_stale_as_asked(study, staleness):
    """Their versions say so, and their log-probabilities: the ratio to the trained policy is 1 only where it wrote."""
    metrics = steps(study, "learner, m = 1", staleness)
    assert [step["staleness"] for step in metrics] == [min(version, staleness) for version in range(SMOKE.steps)]
    fresh = [abs(step["importance_ratio_max"] - 1) < 1e-3 for step in metrics]
    assert fresh == [step["staleness"] == 0 for step in metrics]


def test_without_staleness_both_advantages_train_alike(study):
    learner, rollout = (steps(study, f"{advantage}, m = 64", 0) for advantage in ("learner", "rollout"))
    for one, other in zip(learner, rollout, strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    stale = steps(study, "learner, m = 64", 1)[-1], steps(study, "rollout, m = 64", 1)[-1]
    assert stale[0]["grad_norm"] != pytest.approx(stale[1]["grad_norm"], rel=1e-3)


# The protocol


def test_each_method_is_run_at_each_staleness_with_each_seed_once():
    protocol = Protocol()
    jobs = report_jobs(protocol, {"forward KL": 1.0, "policy gradient": 2.0})
    assert len(set(jobs)) == len(jobs) == len(METHODS) * len(protocol.staleness) * len(protocol.report_seeds)
    assert {job.learning_rate for job in jobs if job.method == "forward KL"} == {1.0}
    runs = {job.runs_as for job in jobs}
    assert len(jobs) - len(runs) == 2 * len(protocol.report_seeds)  # at s = 0, for both m
    assert runs <= set(jobs)
    assert not {job.seed for job in jobs} & {job.seed for job in selection_jobs(protocol)}


def test_a_family_gets_the_rate_of_the_best_mean_and_at_equality_the_lower():
    def record(exact_match):
        return {"exact_match": exact_match}

    selection = {
        Job("forward KL", 1, 0.1, 0): record(0.5),
        Job("forward KL", 1, 0.2, 0): record(0.5),
        Job("learner, m = 64", 1, 0.1, 0): record(0.9),
        Job("learner, m = 64", 1, 0.2, 0): record(0.6),
        Job("rollout, m = 64", 1, 0.1, 0): record(0.1),
        Job("rollout, m = 64", 1, 0.2, 0): record(0.6),
    }
    assert choose_rates(selection) == {"forward KL": 0.1, "policy gradient": 0.2}


# Verdicts


def test_the_error_of_a_mean_pools_a_methods_variances():
    def job(staleness, seed):
        return Job("forward KL", staleness, 0.1, seed)

    values = {job(0, 1): 0.5, job(0, 2): 0.7, job(1, 1): 0.1, job(1, 2): 0.1}
    found = cells({one: {"exact_match": value} for one, value in values.items()}, "exact_match", 100)
    # Variances 200 and 0, in percent: pooled 100, over two seeds.
    assert found["forward KL", 0].mean == pytest.approx(60)
    assert found["forward KL", 1].error == pytest.approx((100 / 2) ** 0.5)


def test_one_seed_decides_nothing():
    jobs = report_jobs(replace(SMOKE, report_seeds=(1,)), {"forward KL": 0.1, "policy gradient": 0.1})
    found = cells({job: {"exact_match": 0.1 * job.staleness} for job in jobs}, "exact_match", 100)
    assert str(found["forward KL", 2]) == "20.0"
    assert all("Undecided" in line or "Not by these numbers" in line for line in verdicts(found, SMOKE))


def verdicts_of(protocol=SMOKE, **means):
    """With the given means at s = 2 and 50 everywhere else, and an error of 1."""
    names = {name.replace(", m = ", ""): name for name in METHODS}
    found = {(method, s): Cell(50.0, 1.0) for method in METHODS for s in protocol.staleness}
    found |= {(names[name.replace("forward", "forward KL")], 2): Cell(value, 1.0) for name, value in means.items()}
    return verdicts(found, protocol)


def test_flat_is_no_difference_that_counts_under_a_small_error():
    assert "**Yes**" in verdicts_of(forward=48)[0]
    assert "**No**" in verdicts_of(forward=46)[0]
    assert "**No**" in verdicts_of(forward=54)[0]
    assert "**Undecided**" in verdicts_of(replace(SMOKE, flat_error=1.0), forward=48)[0]


def test_above_is_a_difference_that_counts():
    _, one, many = verdicts_of(learner1=54, rollout64=54)
    assert "**Yes**, at s = 2" in one
    assert "**No**, below it at s = 2" in many
    assert "**Not by these numbers**" in verdicts_of(learner1=52)[1]


# The script


def run_script(study, *options):
    command = [sys.executable, "scripts/study_staleness.py", "--student", study.student, "--teacher", study.teacher]
    command += ["--output", study.output, "--smoke", "--jobs", 1, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([str(part) for part in command], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_script_writes_its_report_and_goes_on_where_it_was(study):
    done = run_script(study)
    assert done.returncode == 0, done.stderr
    results = study.output / "results.jsonl"
    page = (study.output / "report.md").read_text()
    assert page.strip() in done.stdout
    assert "nan" not in page
    for plot in ("staleness_exact_match.svg", "staleness_kl.svg"):
        assert f"]({plot})" in page
        assert ElementTree.parse(study.output / plot).getroot().tag.endswith("svg")

    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(lines[:-1]) + lines[-1][:20])  # stopped within a line
    done = run_script(study)
    assert done.returncode == 0, done.stderr
    assert "1/1" in done.stdout
    assert len({json.dumps(json.loads(line)) for line in results.read_text().splitlines()}) == len(lines)

    done = run_script(replace(study, student=study.teacher))
    assert done.returncode == 2
    assert "other models" in done.stderr
