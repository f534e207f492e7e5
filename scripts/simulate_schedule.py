"""What a schedule would make of a cluster: the real Conductor on a virtual clock, as a table.

    python scripts/simulate_schedule.py [--model 4b] [--num-rollout 4 --num-trainer 3 --num-teacher 1] [--json FILE]

Tokens/s are trained response tokens over the (virtual) time of `--steps` steps after `--warmup`. "sync" is the same
devices with writing, scoring and training one after the other; "sync, colocated" lets every device do each of the three
in turn, for free. Busy: share of time in which an engine writes, the teacher scores, the trainer trains. Staleness:
share of the trained tokens by versions between the one that wrote them and the one that they train.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace

from titan_opd.schedule.rules import IN_FLIGHT, ON_LIMIT, ScheduleRules
from titan_opd.schedule.simulation import Cluster, Outcome, simulate

# Round numbers for an 80 GB GPU of 3.35 TB/s and 990 dense bfloat16 TFLOP/s, student of that size in bfloat16.
# Decoding a token: the weights once plus some milliseconds, and for each row the keys and values of about 3,500 tokens.
# Training: 8 FLOP a parameter and token (activations recomputed) at about a fifth of the peak. Scoring: a teacher about
# four times larger, 2 FLOP a parameter and token at about 40 %.
MODELS = {
    "1.7b": {
        "decode_seconds": 0.006,
        "decode_seconds_per_row": 0.00013,
        "train_tokens_per_second": 14_000.0,
        "score_tokens_per_second": 25_000.0,
    },
    "4b": {
        "decode_seconds": 0.009,
        "decode_seconds_per_row": 0.00015,
        "train_tokens_per_second": 6_000.0,
        "score_tokens_per_second": 14_000.0,
    },
    "8b": {
        "decode_seconds": 0.012,
        "decode_seconds_per_row": 0.00017,
        "train_tokens_per_second": 3_100.0,
        "score_tokens_per_second": 6_200.0,
    },
}
COLUMNS = (
    "schedule",
    "s",
    "tokens/s",
    "x sync",
    "x colocated",
    "rollout",
    "rows",
    "teacher",
    "trainer",
    "staleness 0 1 ...",
)


def main(options: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(options)
    cluster = cluster_of(arguments)
    print(f"{arguments.steps} steps of {arguments.batch} samples after {arguments.warmup} of warm-up;", end=" ")
    print(f"async with on_limit {arguments.on_limit}, in_flight {arguments.in_flight}")
    print(", ".join(f"{field.name} {getattr(cluster, field.name):g}" for field in fields(cluster)), end="\n\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    baselines: list[float] = []
    lines = []
    for name, rules, outcome in outcomes(arguments, cluster):
        if len(baselines) < 2:
            baselines.append(outcome.tokens_per_second)
        speed_ups = [outcome.tokens_per_second / baseline for baseline in baselines]
        print(row(name, rules, outcome, speed_ups), flush=True)
        lines.append({"schedule": name, "rules": asdict(rules), "cluster": asdict(cluster), **asdict(outcome)})
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def parse_arguments(options: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="4b", help="speeds of a student of this size")
    parser.add_argument("--batch", type=int, default=256, help="answers per policy version")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4, 8], help="values of max_staleness")
    parser.add_argument("--on-limit", choices=ON_LIMIT, default="wait", help="of the rows with mode async")
    parser.add_argument("--in-flight", choices=IN_FLIGHT, default="keep", help="of the rows with mode async")
    parser.add_argument("--steps", type=int, default=60, help="measured steps")
    parser.add_argument("--warmup", type=int, default=15, help="steps before them")
    parser.add_argument("--json", help="file for one JSON object a row")
    for field in fields(Cluster):
        kind = type(field.default)
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=kind, help=f"see Cluster; default {field.default}"
        )
    return parser.parse_args(options)


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """The model's speeds, with what was asked for in their place."""
    asked = {field.name: getattr(arguments, field.name) for field in fields(Cluster)}
    return Cluster(**{**MODELS[arguments.model], **{name: value for name, value in asked.items() if value is not None}})


def outcomes(arguments: argparse.Namespace, cluster: Cluster) -> Iterator[tuple[str, ScheduleRules, Outcome]]:
    """(name, rules, outcome) of each row; the two synchronous ones first."""
    length = {"steps": arguments.warmup + arguments.steps, "warmup": arguments.warmup}
    num_devices = cluster.num_rollout + cluster.num_trainer + cluster.num_teacher
    colocated = replace(cluster, num_rollout=num_devices, num_trainer=num_devices, num_teacher=0)
    rules = ScheduleRules(arguments.batch)
    yield "sync", rules, simulate(cluster, rules, **length, phases_overlap=False)
    yield "sync, colocated", rules, simulate(colocated, rules, **length, phases_overlap=False)
    for staleness in arguments.staleness:
        rules = ScheduleRules(arguments.batch, staleness, "step_off")
        yield "step_off", rules, simulate(cluster, rules, **length)
    for staleness in arguments.staleness:
        rules = ScheduleRules(arguments.batch, staleness, "async", arguments.on_limit, arguments.in_flight)
        yield "async", rules, simulate(cluster, rules, **length)


def row(name: str, rules: ScheduleRules, outcome: Outcome, speed_ups: list[float]) -> str:
    relative = [f"{speed_up:.2f}" for speed_up in speed_ups] + [""] * (2 - len(speed_ups))
    busy = [f"{share:.0%}" for share in (outcome.teacher_busy, outcome.trainer_busy)]
    histogram = " ".join(f"{outcome.staleness.get(s, 0):.0%}" for s in range(max(outcome.staleness) + 1))
    notes = [f"{count} {what}" for what in ("dropped", "restarted", "masked") if (count := getattr(outcome, what))]
    cells = [
        name,
        str(rules.max_staleness),
        f"{outcome.tokens_per_second:,.0f}",
        *relative,
        f"{outcome.rollout_busy:.0%}",
        f"{outcome.rollout_rows:.0f}",
        *busy,
        "; ".join([histogram, *notes]),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
