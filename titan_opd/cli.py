"""The command line: titan-opd train | plan | eval | export | trace | worker."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from titan_opd import __version__
from titan_opd.channel.errors import ChannelError
from titan_opd.errors import LostProcessError, NotBuiltError, StallError, StorageError, WeightError

if TYPE_CHECKING:
    from titan_opd.config import Config

# Errors, beside a ValueError, whose text is all that a person needs.
_NAMED = (StorageError, StallError, LostProcessError, ChannelError, WeightError, NotBuiltError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0; 2 for what the user can mend in the settings; 1 when something is not built, could not be
        written, stalled or was lost; 130 after Ctrl-C and 143 after SIGTERM.
    """
    options, overrides = _parser().parse_known_args(arguments)
    if overrides and not hasattr(options, "config"):
        _parser().error(f"unrecognized arguments: {' '.join(overrides)}")
    signals: list[int] = []
    try:
        with _interruptible(signals):
            return options.run(options, overrides)
    except (Exception, KeyboardInterrupt) as error:
        # Torch wraps interrupts, and the end of the other processes breaks connections: any error can come of a signal.
        if signals or isinstance(error, KeyboardInterrupt):
            resume = "; the same command with --resume goes on from the newest checkpoint"
            message = f"interrupted{resume if options.command == 'train' else ''}"
            status = 128 + (signals or [signal.SIGINT])[0]
        elif isinstance(error, (ValueError, *_NAMED)):
            message = f"error: {error}"
            status = 2 if isinstance(error, ValueError) else 1
        else:
            raise
        # A ValueError can be of one process alone, and the main one can be lost; all others are known to all.
        if _is_main() or isinstance(error, (ValueError, LostProcessError)):
            print(f"titan-opd {options.command}: {message}", file=sys.stderr)
        return status


@contextmanager
def _interruptible(signals: list[int]) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM raise KeyboardInterrupt in the process that talks to the person, and note them.

    The other processes die of them at once: a handler would wait until a collective returns, and without the main
    process it never does.
    """

    def interrupt(number: int, _: object) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    handler = interrupt if _is_main() else signal.SIG_DFL
    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="titan-opd", allow_abbrev=False, description="On-policy distillation of language models."
    )
    parser.add_argument("--version", action="version", version=f"titan-opd {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    override = "any option of the configuration can follow: --section.key VALUE"

    command = commands.add_parser("train", help="train as a TOML file says", epilog=override)
    command.add_argument("config", help="TOML file; see train_configs/")
    command.add_argument("--resume", action="store_true", help="go on with the run in run.directory")
    command.add_argument(
        "--replay", metavar="JOURNAL", help="train again on the batches that a run with journal.payload kept"
    )
    command.add_argument("--dry-run", action="store_true", help="check everything that can be checked, train nothing")
    command.set_defaults(run=_train)

    command = commands.add_parser("plan", help="say what a run will need, before it runs", epilog=override)
    command.add_argument("config", help="TOML file; of its models only the shapes are read")
    command.add_argument("--world", type=int, metavar="N", help="trainer processes (default: what [parallel] asks for)")
    command.add_argument("--prompt-tokens", type=int, metavar="N", help="of each prompt (default: the longest allowed)")
    command.add_argument("--answer-tokens", type=int, metavar="N", help="of each answer (default: the longest allowed)")
    command.add_argument("--device", default="h100", help="of all roles: a100, h100 (default) or h200")
    command.add_argument("--flops", type=float, metavar="TFLOPS", help="of the device, instead of its datasheet's")
    command.add_argument("--bandwidth", type=float, metavar="GB/S", help="of its memory, instead of its datasheet's")
    command.add_argument("--utilization", type=float, default=0.4, help="share of these that is reached (default: 0.4)")
    command.add_argument("--json", metavar="FILE", help="write the numbers there, too")
    command.set_defaults(run=_plan)

    command = commands.add_parser("eval", help="answer and grade the evaluation prompts", epilog=override)
    command.add_argument("config", help="TOML file; --student.path RUN/checkpoints/step-N evaluates a checkpoint")
    command.set_defaults(run=_evaluate)

    command = commands.add_parser(
        "export", help="write a run's checkpoint as a Hugging Face model; under torchrun, together"
    )
    command.add_argument("run_directory", metavar="RUN", help="folder of the run")
    command.add_argument("output", metavar="OUT", help="new folder for the model")
    command.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    command.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="of the weights"
    )
    command.set_defaults(run=_export)

    command = commands.add_parser("trace", help="merge the events of a run with observe.trace into trace.json")
    command.add_argument("run_directory", metavar="RUN", help="folder of the run, finished or not")
    command.set_defaults(run=_trace)

    command = commands.add_parser("worker", help="join a run as one of its roles", epilog=override)
    command.add_argument("config", help="the run's TOML file: its config.toml, or a copy on another machine")
    command.add_argument("--role", required=True, choices=("rollout", "teacher", "conductor"))
    command.add_argument("--connect", help="the conductor's address (default: channel.address, or this machine's own)")
    command.add_argument("--name", help="unique in the run (default: role, host and process number)")
    command.add_argument("--cores", default="", help="where it may run, such as 0-3,8")
    command.add_argument("--ranks", type=int, default=1, help="of a conductor: the trainer's processes")
    command.add_argument("--restore", metavar="FILE", help="of a conductor: the state it goes on from")
    command.add_argument("--ends-with-parent", action="store_true", help="end when the process that started it does")
    command.set_defaults(run=_worker)
    return parser


# The commands import what they need when they run, so that --help and a wrong key answer at once.


def _train(options: argparse.Namespace, overrides: list[str]) -> int:
    from titan_opd.config import dump_toml, load_config

    config = load_config(options.config, overrides)
    _say(dump_toml(config))
    if options.replay and options.resume:
        raise ValueError(
            "--replay begins a new run from recorded batches and cannot go on with one: leave out --resume"
        )
    replay = Path(options.replay) if options.replay else None
    if options.dry_run:
        _dry_run(config, replay)
        return 0

    from titan_opd.observe import print_tables
    from titan_opd.train import train

    tables = train(config, resume=options.resume, replay=replay).tables()
    if _is_main():
        print_tables(tables)
    return 0


def _dry_run(config: Config, replay: Path | None) -> None:
    from titan_opd.assemble import assemble
    from titan_opd.config.schema import ParallelConfig
    from titan_opd.parallel import open_world
    from titan_opd.run import check_directory
    from titan_opd.schedule.replay import ReplaySchedule

    check_directory(Path(config.run.directory))
    parallel = config.parallel
    is_alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
    with open_world(ParallelConfig() if is_alone else parallel) as world:
        _say(*assemble(config, world).describe())
        if replay is not None:
            ReplaySchedule(replay, num_steps=config.training.steps, world=world)
    if is_alone and parallel.dp_replicate * max(parallel.dp_shard, 1) * parallel.tp > 1:
        _say("[parallel] was not tried in this one process: `titan-opd plan` does, for any number")
    _say("dry run: the configuration can be trained")


def _plan(options: argparse.Namespace, overrides: list[str]) -> int:
    from titan_opd.config import load_config

    config = load_config(options.config, overrides)

    from titan_opd.observe import print_tables
    from titan_opd.planning import report
    from titan_opd.planning.devices import pick_device
    from titan_opd.planning.plan import make_plan

    plan = make_plan(
        config,
        num_processes=options.world,
        prompt_tokens=options.prompt_tokens,
        answer_tokens=options.answer_tokens,
        device=pick_device(options.device, flops=options.flops, bandwidth=options.bandwidth),
        utilization=options.utilization,
    )
    _say(*report.describe(plan))
    print_tables(report.tables(plan))
    _say(*report.other_volumes(plan), *report.verdict(plan))
    if options.json:
        report.write_json(plan, Path(options.json))
    return 0


def _evaluate(options: argparse.Namespace, overrides: list[str]) -> int:
    from titan_opd.config import load_config

    config = load_config(options.config, overrides)
    if config.student.initialize == "random":
        raise ValueError(
            f"student.initialize = 'random' would evaluate random weights, not those in student.path = "
            f"{config.student.path!r}; add --student.initialize checkpoint"
        )

    from titan_opd.assemble import assemble
    from titan_opd.parallel import open_world

    with open_world() as world:
        parts = assemble(config, world)
        _say(*parts.describe())
        if parts.evaluator is None:
            raise ValueError("there are no evaluation prompts; set data.evaluation to a file that has some")
        _say(str(parts.evaluator.run(version=0)))
    return 0


def _export(options: argparse.Namespace, _: list[str]) -> int:
    import torch

    from titan_opd.checkpoint import pick_checkpoint
    from titan_opd.checkpoint.export import export_model
    from titan_opd.parallel import open_world

    checkpoint = pick_checkpoint(Path(options.run_directory), options.step)
    with open_world() as world:
        export_model(checkpoint, Path(options.output), getattr(torch, options.dtype), world=world)
    _say(f"wrote {checkpoint} as {options.dtype} to {options.output}")
    return 0


def _trace(options: argparse.Namespace, _: list[str]) -> int:
    from titan_opd.observe.trace_merge import merge_trace

    merge_trace(Path(options.run_directory))
    return 0


def _worker(options: argparse.Namespace, overrides: list[str]) -> int:
    from titan_opd.config import load_config
    from titan_opd.workers.process import run_worker

    return run_worker(
        load_config(options.config, overrides),
        role=options.role,
        endpoint=options.connect,
        name=options.name,
        cores=options.cores,
        num_ranks=options.ranks,
        restore=None if options.restore is None else Path(options.restore),
        ends_with_parent=options.ends_with_parent,
    )


def _is_main() -> bool:
    """Whether this process talks to the person; torchrun numbers its processes in RANK."""
    return os.environ.get("RANK", "0") == "0"


def _say(*lines: str) -> None:
    if _is_main():
        print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
