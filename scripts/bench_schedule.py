"""Measures how much of two pinned groups of processes a schedule keeps busy, and what it trains a second.

    python scripts/bench_schedule.py [--repeats 7] [--cores 0 1] [--json FILE] [--plot FILE] [--trace FOLDER]

Prints its definition, the machine, a table in Markdown, and one JSON line for each measurement to --json. Needs two
cores. With --trace, one run of each schedule also leaves its trace there, and is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts its threads; a group is one core

import torch
from bench_gather_stats import cpu_model, spread
from svg_plot import Line, write_plot
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from titan_opd.assemble import Parts, assemble
from titan_opd.config import Config, load_config
from titan_opd.data import Sample, ScoredTrajectory, Trajectory, pack
from titan_opd.learner import Learner
from titan_opd.models import Decoder, DecoderConfig, save_decoder
from titan_opd.observe import read_metrics
from titan_opd.parallel import open_world
from titan_opd.parallel.cores import pin_to_cores
from titan_opd.weights import named_weights
from titan_opd.workers.roles import answers_at_a_time

DEFINITION = """\
Two groups of processes, each on a core of its own: the rollout worker, and the trainer with the teacher worker and the
conductor. Trained tokens/s: response tokens of the last {steps} steps over the time from the end of the step before
them to the end of the last, after {warmup} steps of warm-up; each run is `titan-opd train` from its start. Every
schedule, sync too, has the same processes on the same cores: they differ in what may overlap.

Limit: each group's work measured alone, on its core, while the other core has none of this benchmark's work. Rollout:
an engine that is always full writes the answers, and takes new weights after each batch. Trainer and teacher: the sum
of scoring, packing and training. The group that takes longer for a token sets the limit; nothing that goes between
processes is in it.

{repeats} repeats; in each the two groups alone, then every schedule, one after the other. Median (smallest - largest)
over repeats; of the limit: a repeat's tokens/s over the same repeat's limit. Headers: bytes of all messages that the
conductor got and sent in a run, beats included, over its answers.
Models: random, {student:.2f} M parameters (student), {teacher:.2f} M (teacher); {batch} answers a step, {rows} at a
time, of {tokens:.0f} tokens on average and at most {longest}."""

CONFIG = """\
[run]
threads = 1
cores = "{training_core}"
[channel]
cores = "{training_core}"
[student]
path = "{folder}/student"
[teacher]
path = "{folder}/teacher"
top_k = 8
placement = "workers"
workers = 1
cores = ["{training_core}"]
[objective]
kind = "forward_kl"
[rollout]
placement = "workers"
workers = 1
cores = ["{rollout_core}"]
max_concurrent = {rows}
[rollout.sampling]
max_new_tokens = {longest}
[data]
train = "{folder}/prompts.jsonl"
template = "plain"
max_prompt_tokens = 16
[schedule]
batch = {batch}
[training]
steps = {total_steps}
[optimizer]
learning_rate = 0.0 # the answers stay as long as they are
[observe]
progress = false
tensorboard = false
"""
STOP, VOCAB_SIZE = "<stop>", 200
LOG_LINE = re.compile(r"headers of (\d+) answers: (\d+) bytes came in, (\d+) went out")


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        student, teacher: shapes.
        batch: answers a step.
        rows: answers that are written at a time.
        longest: most tokens of an answer.
        warmup, steps: a run's.
    """

    student: DecoderConfig
    teacher: DecoderConfig
    batch: int
    rows: int
    longest: int
    warmup: int
    steps: int


def shape(hidden_size: int, num_layers: int) -> DecoderConfig:
    return DecoderConfig(
        family="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=512,
        eos_token_ids=(0,),
    )


WORKLOAD = Workload(shape(192, 4), shape(256, 4), batch=16, rows=12, longest=400, warmup=2, steps=7)
SMOKE = Workload(shape(16, 1), shape(16, 1), batch=8, rows=4, longest=8, warmup=1, steps=2)
SCHEDULES = {
    "sync": ("--schedule.mode", "sync"),
    "step_off, s = 2": ("--schedule.mode", "step_off", "--schedule.max_staleness", "2"),
    "async, s = 2": ("--schedule.mode", "async", "--schedule.max_staleness", "2"),
}


@dataclass(frozen=True)
class Alone:
    """A group's work, measured alone: seconds for each part, and the response tokens that they did."""

    seconds: dict[str, float]
    tokens: int

    @property
    def seconds_per_token(self) -> float:
        return sum(self.seconds.values()) / self.tokens


@dataclass(frozen=True)
class Measured:
    """A run of a schedule.

    Attributes:
        tokens_per_second: of the measured steps.
        tokens_per_answer: their mean.
        header_bytes_per_answer: through the conductor, of the whole run.
        staleness: mean of the measured steps' tokens, in versions.
        phases: the trainer's seconds a step.
    """

    tokens_per_second: float
    tokens_per_answer: float
    header_bytes_per_answer: float
    staleness: float
    phases: dict[str, float]


def tokenizer_of(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A token for each word, and one that ends a text: random models write it with a chance of one in all tokens."""
    vocabulary = {word: index for index, word in enumerate([STOP, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=STOP))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=STOP, pad_token=STOP)


def write_models(folder: Path, workload: Workload, cores: Sequence[int]) -> None:
    """Both models, random, their tokenizer, prompts, and the configuration."""
    words = [f"w{number}" for number in range(VOCAB_SIZE - 1)]
    for seed, (name, config) in enumerate([("student", workload.student), ("teacher", workload.teacher)]):
        decoder = Decoder(config)
        decoder.init_weights(torch.Generator().manual_seed(seed))
        (folder / name).mkdir()
        tokenizer_of(words).save_pretrained(folder / name)
        save_decoder(decoder, folder / name)
    draw = random.Random(0)
    prompts = [{"prompt": " ".join(draw.choices(words, k=draw.randint(4, 16)))} for _ in range(1000)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    steps = workload.warmup + workload.steps
    values = {"folder": folder, "rollout_core": cores[0], "training_core": cores[1], "total_steps": steps}
    (folder / "config.toml").write_text(CONFIG.format(**(vars(workload) | values)))


# ---- The groups alone ------------------------------------------------------------------------------------------------


class Group:
    """A process of its own on a core, which lives as long as the benchmark and does one group's work alone."""

    def __init__(self, core: int, config_file: Path, workload: Workload) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=_pin, initargs=(core,))
        self._arguments = (config_file, workload)

    def rollout(self) -> Alone:
        return self._pool.submit(rollout_alone, *self._arguments).result()

    def training(self) -> Alone:
        return self._pool.submit(training_alone, *self._arguments).result()

    def close(self) -> None:
        self._pool.shutdown()


def _pin(core: int) -> None:
    pin_to_cores(str(core), "--cores")
    torch.set_num_threads(1)


def _parts_of(config_file: Path) -> Config:
    config = load_config(config_file)
    here = {"placement": "colocated", "workers": 0, "cores": ()}
    config = replace(config, run=replace(config.run, cores=""))
    return replace(config, rollout=replace(config.rollout, **here), teacher=replace(config.teacher, **here))


def rollout_alone(config_file: Path, workload: Workload) -> Alone:
    """Write answers with an engine that is always full, one batch after the other."""
    config = _parts_of(config_file)
    with open_world() as world:
        parts = assemble(config, world)
    batches = _full_engine(parts, config)
    for _ in range(workload.warmup):
        next(batches)
    start = time.perf_counter()
    tokens = sum(_num_tokens(next(batches)) for _ in range(workload.steps))
    return Alone({"rollout": time.perf_counter() - start}, tokens)


def _full_engine(parts: Parts, config: Config) -> Iterator[list[Trajectory]]:
    engine, version = parts.engine, 0
    finished: list[Trajectory] = []
    while True:
        samples: list[Sample] = parts.prompts.take(engine.free_capacity)
        engine.submit(samples, config.rollout.sampling, parts.recording)
        finished += engine.step()
        if len(finished) >= config.schedule.batch:
            version += 1
            engine.load_weights(named_weights(parts.student), version)
            yield finished[: config.schedule.batch]
            finished = finished[config.schedule.batch :]


def training_alone(config_file: Path, workload: Workload) -> Alone:
    """Score, pack and train batches that are written beforehand, one part after the other."""
    config = _parts_of(config_file)
    at_a_time = answers_at_a_time(load_config(config_file))
    seconds: Counter[str] = Counter()
    tokens = 0
    with open_world() as world:
        parts = assemble(config, world)
        steps = workload.warmup + workload.steps
        learner = Learner(parts.model, config.objective, config.optimizer, num_steps=steps, seed=0, world=world)
        for step in range(steps):
            answers = parts.engine.generate(parts.prompts.take(workload.batch), config.rollout.sampling)
            times = [time.perf_counter()]
            scored: list[ScoredTrajectory] = []
            for first in range(0, len(answers), at_a_time):
                scored += parts.scorer.score(answers[first : first + at_a_time])
            times.append(time.perf_counter())
            batches = pack(scored, config.training.tokens_per_microbatch)
            learner.step(batches, current_version=step)
            times.append(time.perf_counter())
            if step >= workload.warmup:
                tokens += _num_tokens(answers)
                for name, begin, end in zip(("score", "train"), times, times[1:], strict=False):
                    seconds[name] += end - begin
    return Alone(dict(seconds), tokens)


def _num_tokens(answers: list[Trajectory]) -> int:
    return sum(len(answer.response_ids) for answer in answers)


# ---- The schedules ---------------------------------------------------------------------------------------------------


def run_schedule(folder: Path, run: Path, workload: Workload, name: str, *options: str) -> Measured:
    """Train a run of a schedule, and read what it wrote."""
    command = [sys.executable, "-m", "titan_opd", "train", folder / "config.toml", "--run.directory", run]
    command += [*SCHEDULES[name], *options]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return read_run(run, workload)


def read_run(run: Path, workload: Workload) -> Measured:
    """The measures of a finished run."""
    rows = read_metrics(run, "train")
    before, measured = rows[workload.warmup - 1], rows[workload.warmup :]
    tokens = sum(row["tokens"] for row in measured)
    phases = {key.removeprefix("seconds/") for key in measured[0] if key.startswith("seconds/")}
    found = LOG_LINE.search((run / "workers" / "conductor.log").read_text())
    if found is None:
        raise RuntimeError(f"{run}/workers/conductor.log does not tell the bytes of headers; did the conductor fail?")
    num_answers, received, sent = map(int, found.groups())
    return Measured(
        tokens_per_second=tokens / (measured[-1]["time"] - before["time"]),
        tokens_per_answer=tokens / (len(measured) * workload.batch),
        header_bytes_per_answer=(received + sent) / num_answers,
        staleness=statistics.fmean(row.get("staleness/mean", 0.0) for row in measured),
        phases={name: statistics.fmean(row[f"seconds/{name}"] for row in measured) for name in sorted(phases)},
    )


# ---- The benchmark ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repeat:
    """One repeat: both groups alone, and each schedule."""

    rollout: Alone
    training: Alone
    schedules: dict[str, Measured]

    @property
    def limit(self) -> float:
        """Tokens/s that no schedule exceeds whose groups work as fast as alone."""
        return 1 / max(self.rollout.seconds_per_token, self.training.seconds_per_token)


def bench(folder: Path, workload: Workload, repeats: int, cores: list[int]) -> Iterator[Repeat]:
    """The repeats, as they are done."""
    groups = [Group(core, folder / "config.toml", workload) for core in cores]
    for number in range(repeats):
        rollout, training = groups[0].rollout(), groups[1].training()
        schedules = {
            name: run_schedule(folder, folder / f"run-{number}-{index}", workload, name)
            for index, name in enumerate(SCHEDULES)
        }
        yield Repeat(rollout, training, schedules)
    for group in groups:
        group.close()


def table(repeats: list[Repeat]) -> str:
    """Markdown: what each group does alone, and what each schedule reaches."""
    groups = {"rollout": [one.rollout for one in repeats], "trainer, teacher": [one.training for one in repeats]}
    lines = ["| group alone | tokens/s | of which |", "|---|---|---|"]
    for name, measured in groups.items():
        totals = {part: sum(one.seconds[part] for one in measured) for part in measured[0].seconds}
        parts = ", ".join(f"{part} {seconds / sum(totals.values()):.0%}" for part, seconds in totals.items())
        lines.append(f"| {name} | {spread([1 / one.seconds_per_token for one in measured], 0)} | {parts} |")
    lines += [
        "",
        "| schedule | tokens/s | of the limit | staleness | headers, bytes an answer |",
        "|---|---|---|---|---|",
    ]
    for name in SCHEDULES:
        measured = [one.schedules[name] for one in repeats]
        cells = [
            name,
            spread([one.tokens_per_second for one in measured], 0),
            spread(shares_of_limit(repeats)[name], 1) + " %",
            f"{statistics.fmean(one.staleness for one in measured):.2f}",
            spread([one.header_bytes_per_answer for one in measured], 0),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(path: Path, shares: dict[str, list[float]]) -> None:
    """Each schedule's share of the limit, in percent, repeat by repeat."""
    lines = [Line(name, range(1, len(values) + 1), values) for name, values in shares.items()]
    write_plot(path, "Tokens a second, of the limit", lines, x_label="repeat", y_label="% of the limit")


def shares_of_limit(repeats: list[Repeat]) -> dict[str, list[float]]:
    return {name: [100 * one.schedules[name].tokens_per_second / one.limit for one in repeats] for name in SCHEDULES}


def definition(workload: Workload, repeats: int, tokens: float) -> str:
    sizes = [
        sum(p.numel() for p in Decoder(config).parameters()) / 1e6 for config in (workload.student, workload.teacher)
    ]
    values = {"student": sizes[0], "teacher": sizes[1], "tokens": tokens, "repeats": repeats}
    return DEFINITION.format(**(vars(workload) | values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--cores", type=int, nargs=2, default=(0, 1), help="of rollout, and of trainer and teacher")
    parser.add_argument("--json", type=Path, help="file that gets a JSON line for each repeat")
    parser.add_argument("--plot", type=Path, help="SVG file that gets a plot")
    parser.add_argument("--trace", type=Path, help="folder that gets a trace of each schedule")
    parser.add_argument("--smoke", action="store_true", help="tiny models: shows that it works and nothing else")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats} must be at least 1")
    workload, cores = SMOKE if options.smoke else WORKLOAD, list(options.cores)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder, workload, cores)
        if options.trace:
            for schedule in SCHEDULES:
                run = options.trace / schedule.replace(", s = ", "-")
                run_schedule(folder, run, workload, schedule, "--observe.trace", "true")
        repeats = []
        for repeat in bench(folder, workload, options.repeats, cores):
            repeats.append(repeat)
            if options.json:
                with options.json.open("a") as lines:
                    lines.write(json.dumps({**asdict(repeat), "limit": repeat.limit}) + "\n")
            reached = {name: f"{one.tokens_per_second / repeat.limit:.0%}" for name, one in repeat.schedules.items()}
            print(f"{len(repeats)}/{options.repeats} {reached}", file=sys.stderr, flush=True)
    tokens = statistics.fmean(one.tokens_per_answer for repeat in repeats for one in repeat.schedules.values())
    print(definition(workload, options.repeats, tokens))
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n{cpu_model()}, {os.cpu_count()} cores, torch {torch.__version__}; load average at the end {load}\n")
    print(table(repeats))
    if options.plot:
        plot(options.plot, shares_of_limit(repeats))


if __name__ == "__main__":
    main()
