"""The memory that `titan-opd plan` predicts against what training takes: SmolLM2-135M's shape with random weights.

Counted: the most bytes that PyTorch's allocator had given out at any moment of two optimizer steps, minus those when
the first one began (on a GPU `max_memory_allocated` minus `memory_allocated`); the model was set up by then, the
optimizer's moments were not. Resident: the growth of the resident set's high-water mark (VmHWM) over the same steps in
a process of its own, without and with glibc told to give every freed block of more than 64 KiB back: what a user of
the CPU sees, with the blocks that the C library keeps.

    python scripts/check_plan.py --tokens 1024 --processes 1 2
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_rollout import SMOLLM2_135M
from torch.profiler import ProfilerActivity, profile

from titan_opd.config.objective import Objective
from titan_opd.config.schema import OptimizerConfig, ParallelConfig, TrainingConfig
from titan_opd.data.records import PackedBatch
from titan_opd.learner import DistillationModel, Learner
from titan_opd.losses import TeacherScores
from titan_opd.models import Decoder, DecoderConfig
from titan_opd.observe import make_table, print_tables
from titan_opd.parallel import init_shards, materialize, open_world, parallelize
from titan_opd.parallel.mesh import axis_sizes
from titan_opd.planning.activations import Workload
from titan_opd.planning.memory import StepMemory
from titan_opd.planning.parts import Grid

K = 64
OBJECTIVE = Objective(kind="forward_kl", support="teacher_topk", tail="bucket")
MIB = 2**20
NUM_STEPS = 2  # the second has the moments that the first one made


@dataclass
class Allocations:
    """Bytes that PyTorch's allocator gave out and took back within a block.

    Attributes:
        peak: the most that were out at any moment.
        end: still out at the end.
    """

    peak: int = 0
    end: int = 0


@contextmanager
def count_allocations(device: torch.device = torch.device("cpu")) -> Iterator[Allocations]:  # noqa: B008 (immutable)
    """Count within the block; on a CPU every single allocation, by the profiler."""
    found = Allocations()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found.peak = torch.cuda.max_memory_allocated(device) - before
        found.end = torch.cuda.memory_allocated(device) - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    events = profiler.profiler.kineto_results.events()
    for _, num_bytes in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        found.end += num_bytes
        found.peak = max(found.peak, found.end)


def make_batch(vocab_size: int, lengths: list[int], num_candidates: int = K) -> PackedBatch:
    """Random tokens and scores, every token trained."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(lengths)
    # Different ids within a row: a start and distances that stay below the vocabulary.
    starts_N1 = torch.randint(vocab_size, (num_tokens, 1), generator=generator)
    ids_NK = (starts_N1 + torch.arange(num_candidates)) % vocab_size
    logprobs_NK = torch.randn(num_tokens, num_candidates, generator=generator).log_softmax(-1) - 0.1
    return PackedBatch(
        input_ids=torch.randint(vocab_size, (num_tokens,), generator=generator),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        max_seqlen=max(lengths),
        loss_positions=torch.arange(num_tokens),
        scores=TeacherScores(ids=ids_NK, logprobs=logprobs_NK, tail_logprobs=(-logprobs_NK.exp().sum(-1)).log1p()),
        token_weights=torch.ones(num_tokens),
        policy_versions=torch.zeros(num_tokens, dtype=torch.int32),
        written_ids=ids_NK[:, 0],
    )


@dataclass(frozen=True)
class Case:
    """What is trained, and on how many processes.

    Attributes:
        shape: content of the model's config.json.
        lengths: of the sequences of a micro-batch.
        num_microbatches: of a step.
        num_candidates: a token.
    """

    shape: dict[str, object]
    lengths: tuple[int, ...]
    training: TrainingConfig
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    num_microbatches: int = 1
    num_candidates: int = K
    num_processes: int = 1


def predict(case: Case) -> int:
    """Bytes that the case's steps take beside the parameters, by the plan."""
    num_tokens = sum(case.lengths)
    replicate, shard, tp = axis_sizes(case.parallel, case.num_processes)
    memory = StepMemory(
        DecoderConfig.from_dict(case.shape),
        Workload(num_tokens, num_tokens, case.num_microbatches, separate_calls=len(set(case.lengths)) > 1),
        Grid(replicate, shard, tp, case.parallel.sequence_parallel),
        training=case.training,
        parallel=case.parallel,
        optimizer=case.optimizer,
        gloo=not torch.cuda.is_available(),
    )
    return memory.optimizer_state + memory.peak.total


@contextmanager
def learner_of(case: Case) -> Iterator[tuple[Learner, list[PackedBatch], torch.device]]:
    """The case set up in this process of its world, and its micro-batches."""
    with open_world(case.parallel) as world:
        config = DecoderConfig.from_dict(case.shape)
        with torch.device("meta"):
            decoder = Decoder(config)
        chunk_mb = case.training.logits_chunk_mb
        model = DistillationModel(decoder, vocab_size=config.vocab_size, logits_chunk_mb=chunk_mb)
        parallelize(model, decoder, world.mesh, case.training, case.parallel)
        materialize(model, world.device)
        init_shards(decoder, torch.Generator().manual_seed(0))
        learner = Learner(
            model, OBJECTIVE, case.optimizer, num_steps=NUM_STEPS, seed=0, world=world, parallel=case.parallel
        )
        batch = make_batch(config.vocab_size, list(case.lengths), case.num_candidates)
        yield learner, [batch] * case.num_microbatches, world.device


def measure_allocations(case: Case) -> int:
    """The peak of this process's allocations over two steps."""
    with learner_of(case) as (learner, batches, device), count_allocations(device) as found:
        for _ in range(NUM_STEPS):
            learner.step(batches, current_version=0)
    return found.peak


def measure_resident(case: Case) -> int:
    """The growth of this process's resident set, by its high-water mark, over two steps."""
    with learner_of(case) as (learner, batches, _):
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        before = _status("VmHWM")
        for _ in range(NUM_STEPS):
            learner.step(batches, current_version=0)
        return _status("VmHWM") - before


def _status(key: str) -> int:
    """Bytes in a line of /proc/self/status."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def in_processes(measure: str, case: Case) -> int:
    """What a function of this module finds in the first of the case's processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (measure, case, folder), nprocs=case.num_processes)
        return int((Path(folder) / "found").read_text())


def _process(rank: int, measure: str, case: Case, folder: str) -> None:
    torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=case.num_processes)
    found = globals()[measure](case)
    if rank == 0:
        (Path(folder) / "found").write_text(str(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="of a micro-batch")
    parser.add_argument("--sequences", type=int, default=4, help="of about equal lengths in it")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="FSDP worlds")
    parser.add_argument("--modes", nargs="+", default=["none", "full"], help="training.recompute_activations")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], help="training.compute_dtype")
    parser.add_argument("--resident", action="store_true", help="measure resident sets, too")
    options = parser.parse_args()

    length = options.tokens // options.sequences
    lengths = [length] * options.sequences
    lengths[0], lengths[-1] = length - 1, options.tokens - sum(lengths[1:-1]) - length + 1
    columns = ["processes, recomputed, type", "predicted MiB", "counted", "predicted / counted"]
    rows = []
    for num_processes in options.processes:
        for mode in options.modes:
            for dtype in options.dtypes:
                training = TrainingConfig(steps=1, recompute_activations=mode, compute_dtype=dtype)
                case = Case(SMOLLM2_135M.to_dict(), tuple(lengths), training, num_processes=num_processes)
                predicted, counted = predict(case), in_processes("measure_allocations", case)
                row = [f"{num_processes}, {mode}, {dtype}", f"{predicted / MIB:.0f}", f"{counted / MIB:.0f}"]
                row.append(f"{predicted / counted:.3f}")
                if options.resident:
                    row.append(f"{in_processes('measure_resident', case) / MIB:.0f}")
                    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # read by glibc as the processes start
                    row.append(f"{in_processes('measure_resident', case) / MIB:.0f}")
                    del os.environ["MALLOC_MMAP_THRESHOLD_"]
                rows.append(row)
                print(*row, sep="  ", flush=True)
    if options.resident:
        columns += ["resident MiB", "resident, freed blocks given back"]
    print(__doc__.split("\n\n")[1])
    print(f"{options.tokens} tokens in {options.sequences} sequences; {platform.machine()}, torch {torch.__version__}")
    print_tables([make_table("Peak minus memory after set-up", columns, rows)])


if __name__ == "__main__":
    main()
