"""`[observe]` and `[profile]`: what a person sees of a run, and what is measured while it goes on."""

from __future__ import annotations

from dataclasses import dataclass

from titan_opd.config.options import MAX_SECONDS, check_section, option


@dataclass(frozen=True)
class ObserveConfig:
    """What a person sees. metrics.jsonl is always written."""

    progress: bool = option(True, "live display in a terminal, plain lines elsewhere; false: only the final table")
    tensorboard: bool = option(True, "event files under `run.directory`/tensorboard")
    log_every: int = option(10, "steps between the plain lines", minimum=1)
    trace: bool = option(False, "a timeline of all processes, `run.directory`/trace.json, for ui.perfetto.dev")
    trace_mb: float = option(256.0, "largest file of events of each process, MiB; what comes later is counted", above=0)
    stall_seconds: float = option(
        600.0,
        "when nothing has moved for so long, the run says who waits for whom, and stops",
        above=0,
        maximum=MAX_SECONDS,
    )
    gpu_counters: str = option(
        "auto",
        "utilization, memory, power, clocks, throttling and ECC errors of the trainer's GPUs in the metrics: 'auto': "
        "where the driver tells them; 'on': an error where it does not; 'off'",
        choices=("auto", "on", "off"),
    )
    peak_tflops: float = option(
        0.0,
        "what one device can do at most, 10^12 operations a second, for the metric `mfu`; 0: the data sheet's dense "
        "bfloat16 figure of a known GPU, and no such metric elsewhere",
        minimum=0,
    )
    memory_history: bool = option(
        False, "keep the stacks of the last GPU allocations, for the snapshot that is written when memory runs out"
    )

    def __post_init__(self) -> None:
        check_section(self, "observe")


@dataclass(frozen=True)
class ProfileConfig:
    """A few steps under torch's profiler; titan_opd/observe/README.md."""

    first_step: int = option(0, "the step, counted from 1, that the profile begins with; 0: no profile", minimum=0)
    num_steps: int = option(2, "steps in the profile", minimum=1)
    ranks: tuple[int, ...] = option((0,), "the trainer's processes that write one each", minimum=0)
    memory: bool = option(False, "also a snapshot of the GPU's memory with the history of these steps")

    def __post_init__(self) -> None:
        check_section(self, "profile")
        if not self.ranks or len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"profile.ranks = {list(self.ranks)} must name at least one process, and none twice")
        plain = ProfileConfig.__dataclass_fields__
        for name in ("num_steps", "ranks", "memory"):
            value = getattr(self, name)
            if self.first_step == 0 and value != plain[name].default:
                raise ValueError(
                    f"profile.{name} = {value!r} has no effect with profile.first_step = 0; set that to the step that "
                    "the profile begins with, or leave it out"
                )

    @property
    def last_step(self) -> int:
        """The step that the profile ends with."""
        return self.first_step + self.num_steps - 1
