"""`Run`: where a run stands, and what happens around its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from titan_opd.checkpoint import CheckpointSaver, load_samples, load_trainer
from titan_opd.checkpoint.folder import cannot_resume
from titan_opd.config import Config
from titan_opd.data.packing import num_inputs
from titan_opd.data.records import ScoredTrajectory
from titan_opd.errors import writing
from titan_opd.evaluation import Evaluator
from titan_opd.learner import Learner
from titan_opd.models import DecoderConfig
from titan_opd.observe import PhaseClock, trace
from titan_opd.observe.diagnosis import RunState
from titan_opd.observe.instruments import Instruments
from titan_opd.observe.out_of_memory import explain_out_of_memory
from titan_opd.observe.stacks import offer_stacks
from titan_opd.observe.staleness import staleness_counts, staleness_metrics
from titan_opd.observe.trace import open_tracer
from titan_opd.observe.trace_merge import merge_trace
from titan_opd.observe.watchdog import Watchdog
from titan_opd.parallel import World
from titan_opd.run.folder import CONFIG_FILE, Start, check_directory, find_start
from titan_opd.run.log import RunLog
from titan_opd.run.summary import RunSummary
from titan_opd.schedule import TrainedSample
from titan_opd.schedule.replay import ReplaySchedule, payload_file
from titan_opd.schedule.samples_file import write_samples
from titan_opd.weights import named_weights
from titan_opd.weights.gap import FLOOR, floor_metrics
from titan_opd.workers.launch import Continuation, Schedule, open_schedule
from titan_opd.workers.weights import describe_weights

if TYPE_CHECKING:
    from titan_opd.assemble import Parts


class Run:
    """One run: its folder, its clock, and where it stands.

    The folder holds `config.toml`, `metrics.jsonl`, `journal.jsonl`, `tensorboard/` and `checkpoints/`. Every process
    has a Run; the main process's writes and talks, the others' take part in what needs all of them.

    Args:
        config: of the run.
        world: the processes.
        clock: of this process.
        start: where the run begins.

    Attributes:
        path: the run's folder.
        summary: what it has found so far.
        step: steps that are done.
        checkpoint: the folder that the run goes on from; None when it begins anew.
    """

    def __init__(self, config: Config, world: World, clock: PhaseClock, start: Start) -> None:
        self.path = Path(config.run.directory)
        self.summary = RunSummary()
        self.step = start.step
        self.checkpoint = start.checkpoint
        self._start = start
        self._config = config
        self._world = world
        self._clock = clock
        self._log = RunLog(self.path, config)
        self._continuation: Continuation | None = None
        self._schedule: Schedule | None = None
        self._saver: CheckpointSaver | None = None
        self._watchdog: Watchdog | None = None
        self._probe_floor: float | None = None
        self._student: DecoderConfig | None = None
        self._instruments = Instruments(config.observe, config.profile, self.path, world)

    @classmethod
    def open(cls, config: Config, world: World, clock: PhaseClock, *, resume: bool) -> Run:
        """A new run in `run.directory`, or the one that is there from its newest checkpoint.

        Nothing is written before `begin`, so that a mistake in the settings that shows while the parts are built leaves
        no folder behind.

        Raises:
            ValueError: another run lives there and `resume` is False, or it was started with other settings; no folder
                can be made there.
        """
        check_directory(Path(config.run.directory))
        start = find_start(config, resume=resume)
        world.barrier()  # all processes have looked before one writes
        return cls(config, world, clock, start)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._saver is not None:
            self._saver.close()
        self.summary.times += self._clock.take()
        self._instruments.close()
        self._log.close(failed=error is not None)

    def begin(self, parts: Parts, learner: Learner) -> None:
        """Claim the folder, put the state of a checkpoint back and open the logs where it left them."""
        self._student = parts.student.config
        empty_logs = {"metrics_bytes": 0, "journal_bytes": 0}
        state = empty_logs
        if self.checkpoint is not None:
            state = load_trainer(self.checkpoint, model=parts.model, optimizer=learner.optimizer)
            missing = sorted({"prompts", "optimizer_steps", *empty_logs} - state.keys())
            if missing:
                raise cannot_resume(self.checkpoint, f"its trainer/state.json lacks {', '.join(missing)}")
            parts.prompts.load_state_dict(state["prompts"])
            learner.steps_taken = state["optimizer_steps"]
            self._probe_floor = state.get("probe_floor")
            parts.engine.load_weights(named_weights(parts.student), self.step)
            if state.get("schedule") is not None:
                self._continuation = Continuation(state["schedule"], load_samples(self.checkpoint))
        self._saver = CheckpointSaver(
            self.path,
            self._config.checkpoint,
            student=parts.student,
            tokenizer=parts.common.tokenizer,
            model=parts.model,
            optimizer=learner.optimizer,
            world=self._world,
            timeout_seconds=self._config.parallel.timeout_seconds,
        )
        if not self._world.is_main:
            return
        self.summary.evaluations = self._log.open(self._start, state)
        self._log.say([*parts.describe(), *describe_weights(self._config, parts), *self._instruments.notes])
        if self.checkpoint is not None:
            self._log.say([f"resumed from {self.checkpoint}"])

    @contextmanager
    def open_schedule(self, parts: Parts, replay: Path | None) -> Iterator[Schedule]:
        """What the configuration asks for, or the batches of the journal `replay`; ended after the block.

        Inside, the process can be asked for its stacks, a device that runs out of memory leaves a snapshot, the process
        is traced where `observe.trace` says so, and in the main process a watchdog ends the run when nothing moves.
        """
        with ExitStack() as stack:
            self._enter_observers(stack)
            with self._unwatched("start of the schedule"):  # whose roles have a time limit of their own
                self._schedule = stack.enter_context(self._opened(parts, replay))
            yield self._schedule

    def _enter_observers(self, stack: ExitStack) -> None:
        observe, rank, is_main = self._config.observe, self._world.rank, self._world.is_main
        stack.enter_context(offer_stacks(self.path, "trainer", rank))
        stack.enter_context(explain_out_of_memory(self.path, "trainer", rank, phase=lambda: self._clock.latest))
        if observe.trace:
            if is_main:
                stack.callback(merge_trace, self.path)  # when all have ended
            stack.enter_context(open_tracer(self.path, "trainer", rank, max_mb=observe.trace_mb))
        if is_main:
            watchdog = Watchdog(self.path, observe.stall_seconds, collect=self._schedule_state)
            self._watchdog = stack.enter_context(watchdog)

    def _opened(self, parts: Parts, replay: Path | None) -> AbstractContextManager[Schedule]:
        if replay is not None:
            return nullcontext(ReplaySchedule(replay, num_steps=self._config.training.steps, world=self._world))
        return open_schedule(
            self._config,
            parts,
            self._world,
            self._clock,
            config_file=self.path / CONFIG_FILE,
            version=self.step,
            continuation=self._continuation,
        )

    def _schedule_state(self) -> RunState | None:
        """Who waits for whom, for the watchdog."""
        report = None if self._schedule is None else self._schedule.report()
        if report is None:
            return None
        return RunState.from_schedule(
            report,
            max_staleness=self._config.schedule.max_staleness,
            lease_seconds=self._config.channel.silence_seconds,
        )

    def _unwatched(self, phase: str) -> AbstractContextManager[None]:
        """A phase in which nothing has to move."""
        return nullcontext() if self._watchdog is None else self._watchdog.paused(phase)

    def is_due(self, every: int) -> bool:
        """Whether something that happens `every` steps (0: only at the end) happens now."""
        return self.step == self._config.training.steps or (every > 0 and self.step % every == 0)

    def begin_step(self) -> None:
        """The next step begins."""
        self._instruments.begin_step(self.step + 1)

    def record(self, scored: Sequence[ScoredTrajectory], metrics: Mapping[str, float]) -> None:
        """The next step is done: write down what it trained (this process's `scored`), its metrics and its times.

        Raises:
            StorageError: a checkpoint could not be written in the background.
        """
        metrics = {**metrics, **self._saver.poll()}
        if self._config.journal.payload and self._world.tp_rank == 0:
            self._keep_payload(scored)
        samples = self._world.gather_shares([TrainedSample.of(one.trajectory) for one in scored])
        if self._config.schedule.mode != "sync":
            staleness = self._staleness(scored)
            trace.counter("staleness", mean=staleness["staleness/mean"], max=staleness["staleness/max"])
            metrics = {**metrics, **staleness}
        metrics = {**metrics, **floor_metrics(metrics, self._probe_floor)}
        self._probe_floor = metrics.get(FLOOR)
        times = self._clock.take()
        self.summary.times += times
        self.step += 1
        metrics |= self._instruments.end_step(
            self.step,
            self._student,
            [num_inputs(one.trajectory) for one in scored if len(one.trajectory.response_ids)],
            num_trained=int(metrics["tokens"]),
            seconds=times.seconds["train"],
        )
        if self._watchdog is not None:
            self._watchdog.progress(f"step {self.step} of the trainer")
        if self._world.is_main:
            self._log.step(self.step, [sample for share in samples for sample in share], metrics, times)

    def _keep_payload(self, scored: Sequence[ScoredTrajectory]) -> None:
        path = payload_file(self.path, self.step + 1, self._world.dp_rank)
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        write_samples(path, scored)

    def _staleness(self, scored: Sequence[ScoredTrajectory]) -> dict[str, float]:
        """How old the tokens are that the step trains, over all processes."""
        bound = self._config.schedule.max_staleness
        counts = torch.zeros(bound + 1, dtype=torch.int64)
        for one in scored:
            versions = one.trajectory.policy_versions
            is_trained = versions >= one.oldest_version
            counts += staleness_counts(versions, is_trained, current_version=self.step, max_staleness=bound)
        return staleness_metrics(self._world.sum(counts))

    def evaluate(self, evaluator: Evaluator | None) -> None:
        """Evaluate the student as it is; nothing without evaluation prompts."""
        if evaluator is None:
            return
        with self._unwatched("evaluation"), self._clock.phase("evaluate"):
            result = evaluator.run(version=self.step)
        self.summary.evaluations[self.step] = result.metrics()
        if self._world.is_main:
            self._log.evaluation(self.step, result)

    def save(self, parts: Parts, learner: Learner, schedule: Schedule) -> None:
        """Save a checkpoint: one consistent cut at the end of the step. The last one is complete on return."""
        with self._unwatched("checkpoint"):
            self._await_save()
            with self._clock.phase("checkpoint"):
                state = {
                    "optimizer_steps": learner.steps_taken,
                    "prompts": parts.prompts.state_dict(),
                    "probe_floor": self._probe_floor,
                }
                cut = schedule.cut()
                if cut is not None:
                    state["schedule"] = cut.state
                if self._world.is_main:
                    state |= self._log.sync()
                self._saver.save(self.step, state, [] if cut is None else list(cut.samples.values()))
            if self.step == self._config.training.steps:
                self._await_save()

    def _await_save(self) -> None:
        """Let the save in the background end, if there is one."""
        if self._saver.is_writing:
            with self._clock.phase("checkpoint_wait"):
                self._saver.wait()
