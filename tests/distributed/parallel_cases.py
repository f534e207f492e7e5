"""The same training on every layout of processes: what is computed in one process and in worlds of two and four.

Imported by spawned processes; models and answers are made from seeds.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.cases import OPTIMIZER, first_gradients, make_batches, make_scorer, uneven_trajectories
from tests.helpers.arithmetic import VOCAB_SIZE, make_decoder
from tests.helpers.communication import CountCommunication
from titan_opd.checkpoint import CheckpointSaver, checkpoint_steps, load_trainer
from titan_opd.config import Objective
from titan_opd.config.float8 import Float8Config
from titan_opd.config.schema import CheckpointConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from titan_opd.data import load_tokenizer, pack
from titan_opd.learner import DistillationModel, Learner
from titan_opd.models import Decoder, DecoderConfig
from titan_opd.parallel import World, begin_micro_batch, init_shards, load_shards, materialize, open_world, parallelize
from titan_opd.weights import named_weights

NUM_STEPS = 5
VOCAB_ROWS = 23  # 12 and 11 for two ranks, 6, 6, 6 and 5 for four; tokens of the task and padding
STUDENTS = {
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama untied": {"model_type": "llama", "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 12},
}
OBJECTIVES = {
    "forward_kl": Objective(kind="forward_kl"),
    "reverse_kl": Objective(kind="reverse_kl"),
    "policy_gradient": Objective(kind="policy_gradient"),
    "hybrid": Objective(kind="hybrid"),
    "jsd": Objective(kind="jsd", support="dense"),
    "m2po": Objective(kind="policy_gradient", correction="m2po", m2_budget=0.02),
}
TRAINING = TrainingConfig(steps=1)
# Of worlds of two and of four processes.
LAYOUTS: dict[int, dict[str, ParallelConfig]] = {
    2: {
        "fsdp": ParallelConfig(),
        "hsdp": ParallelConfig(dp_replicate=2),
        "tp": ParallelConfig(tp=2),
        "tp, sequence": ParallelConfig(tp=2, sequence_parallel=True),
        "offload": ParallelConfig(cpu_offload=True),
        "gathered, prefetched": ParallelConfig(reshard_after_forward=False, prefetch=1),
        "reduced each time": ParallelConfig(reduce_gradients="each"),
    },
    4: {
        "fsdp x tp": ParallelConfig(tp=2),
        "fsdp x tp, sequence": ParallelConfig(tp=2, sequence_parallel=True),
        "hsdp": ParallelConfig(dp_replicate=2),
        "hsdp, reduced each time": ParallelConfig(dp_replicate=2, reduce_gradients="each"),
        "copies x tp": ParallelConfig(dp_replicate=2, tp=2, sequence_parallel=True),
    },
}


def make_student(name: str, **shape: int) -> Decoder:
    """A random decoder whose norms and biases are drawn, too."""
    decoder = make_decoder("llama", seed=0, **{"vocab_size": VOCAB_ROWS} | STUDENTS[name] | shape)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in decoder.named_parameters():
            if parameter.ndim == 1:
                offset = 1.0 if "norm" in parameter_name else 0.0
                parameter.normal_(offset, 0.2, generator=generator)
    return decoder


def make_model(
    student: str, mesh: DeviceMesh, parallel: ParallelConfig, training: TrainingConfig = TRAINING, **shape: int
) -> DistillationModel:
    decoder = make_student(student, **shape)
    model = DistillationModel(decoder, vocab_size=VOCAB_SIZE, logits_chunk_mb=0.001)
    parallelize(model, decoder, mesh, training, parallel, forward_methods=("sweep",))
    return model


def train(
    student: str,
    objective: Objective,
    world: World,
    parallel: ParallelConfig,
    training: TrainingConfig = TRAINING,
    optimizer: OptimizerConfig = OPTIMIZER,
    **shape: int,
) -> dict[str, Any]:
    """Gradients of the first batch, metrics of `NUM_STEPS` steps, the weights after them."""
    model = make_model(student, world.mesh, parallel, training, **shape)
    # Few, but uneven: of two shares one has more micro-batches than the other.
    num_samples = 2 if objective.kind == "hybrid" else 3  # the expert's token and the student's
    answers = [uneven_trajectories(step, num_samples)[:8] for step in range(NUM_STEPS)]
    batches = [make_batches(step, objective, world) for step in answers]
    gradients = first_gradients(model, objective, batches[0], world)
    learner = Learner(model, objective, optimizer, num_steps=NUM_STEPS, seed=0, world=world, parallel=parallel)
    return {
        "gradients": gradients,
        "steps": [learner.step(step, current_version=0) for step in batches],
        "weights": dict(named_weights(model.decoder)),
    }


ALL_CASES = list(itertools.product(STUDENTS, OBJECTIVES))


def cases_of(layout: str) -> list[tuple[str, str]]:
    """Which students train with which objectives.

    All with all where everything meets; in the other layouts of each axis, every objective with a student, and every
    student; else each student once. In another layout it is another combination.
    """
    if layout == "fsdp x tp, sequence":
        return ALL_CASES
    turn, students, kinds = len(layout), list(STUDENTS), list(OBJECTIVES)
    count = len(kinds) if layout in ("fsdp", "tp", "fsdp x tp", "hsdp") else len(students)
    return [(students[i % len(students)], kinds[(turn + i) % len(kinds)]) for i in range(count)]


def layouts_here() -> dict[str, ParallelConfig]:
    """The layouts of the world that there is."""
    return LAYOUTS[dist.get_world_size()] if dist.is_initialized() else {"alone": ParallelConfig()}


# ---- Loading -------------------------------------------------------------------------------------------------------


class CountAllocations(TorchDispatchMode):
    """Adds up the bytes of all storage that operations make on the CPU, freed or not; mapped files are no storage."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **kwargs or {})
        known = {_address(tensor) for tensor in _tensors((args, kwargs))}
        if function is not torch.ops.aten.set_.source_Storage:
            made = {_address(tensor): tensor.untyped_storage().nbytes() for tensor in _tensors(result)}
            self.num_bytes += sum(size for address, size in made.items() if address not in known)
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    leaves = (x.to_local() if isinstance(x, DTensor) else x for x in torch.utils._pytree.tree_leaves(tree))
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.device.type == "cpu"]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def load_layouts(folder: Path) -> dict[str, dict[str, Any]]:
    """For every layout of this world: what was allocated while a model was built and loaded, and its whole weights."""
    results = {}
    for layout, parallel in layouts_here().items():
        with open_world(parallel) as world:
            for student in STUDENTS:
                config = DecoderConfig.from_directory(folder / student)
                with CountAllocations() as count:
                    with torch.device("meta"):
                        decoder = Decoder(config)
                    model = DistillationModel(decoder, vocab_size=VOCAB_SIZE, logits_chunk_mb=0.001)
                    parallelize(model, decoder, world.mesh, TRAINING, parallel, forward_methods=("sweep",))
                    before = count.num_bytes
                    materialize(model, torch.device("cpu"))
                    load_shards(decoder, folder / student)
                loaded = {name: weight.clone() for name, weight in named_weights(decoder)}
                init_shards(decoder, torch.Generator().manual_seed(3))
                results[layout, student] = {
                    "on meta": before,
                    "allocated": count.num_bytes,
                    "own": sum(parameter.to_local().nbytes for parameter in decoder.parameters()),
                    "loaded": loaded,
                    "drawn": dict(named_weights(decoder)),
                }
    return results


# ---- Checkpoints -----------------------------------------------------------------------------------------------------

CHAIN = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 1))  # a run that goes on, step by step, on other meshes of dp x tp
CHECKPOINTED = "qwen3"
SMOOTH = OptimizerConfig(learning_rate=3e-3, eps=1e-3, weight_decay=0.1, decay="constant")
OPTIMIZERS = {"adamw": SMOOTH, "muon": replace(SMOOTH, name="muon", muon_dtype="float32")}


def go_on(folder: Path, mesh: tuple[int, int], place: int) -> dict[str, dict[str, Any]]:
    """One step of each optimizer's run in `folder` on `mesh`, from the checkpoint of the step before to the next."""
    parallel = ParallelConfig(dp_shard=mesh[0], tp=mesh[1])
    with open_world(parallel) as world:
        return {name: take_step(folder / name, place, world, parallel, OPTIMIZERS[name]) for name in OPTIMIZERS}


def take_step(
    folder: Path, place: int, world: World, parallel: ParallelConfig, optimizer: OptimizerConfig, **shape: int
) -> dict[str, Any]:
    """The step `place` of the run in `folder`: from the checkpoint before it, if any, to the one after it."""
    model = make_model(CHECKPOINTED, world.mesh, parallel, **shape)
    objective = OBJECTIVES["forward_kl"]
    learner = Learner(model, objective, optimizer, num_steps=NUM_STEPS, seed=0, world=world, parallel=parallel)
    loaded = {}
    if place > 0:
        checkpoint = checkpoint_steps(folder)[place]
        load_shards(model.decoder, checkpoint)
        load_trainer(checkpoint, model=model, optimizer=learner.optimizer)
        loaded = {name: weight.clone() for name, weight in named_weights(model.decoder)}
    metrics = learner.step(make_batches(uneven_trajectories(place)[:8], objective, world), current_version=place)
    saver = CheckpointSaver(
        folder,
        CheckpointConfig(keep=len(CHAIN), asynchronous=place % 2 == 0),  # both kinds in turn
        student=model.decoder,
        tokenizer=load_tokenizer("arithmetic"),
        model=model,
        optimizer=learner.optimizer,
        world=world,
        timeout_seconds=parallel.timeout_seconds,
    )
    saver.save(place + 1, {}, [])
    saver.wait()
    return {"loaded": loaded, "loss": metrics["loss"], "weights": dict(named_weights(model.decoder))}


# ---- Communication ---------------------------------------------------------------------------------------------------

NUM_MICRO_BATCHES = 3
NUM_GROUPS = 3  # of parameters that FSDP gathers together: a layer, the last layer with the norm, the vocabulary


def count_communication(student: str, world: World, parallel: ParallelConfig) -> dict[str, dict[str, int]]:
    """Calls and bytes of the forward and backward passes of a step with `NUM_MICRO_BATCHES` micro-batches."""
    model = make_model(student, world.mesh, parallel)
    objective = OBJECTIVES["forward_kl"]
    (batch,) = pack(make_scorer(objective).score(world.share(uneven_trajectories(0)[:8])), 1000)
    with CountCommunication() as count:
        for number in range(1, NUM_MICRO_BATCHES + 1):
            begin_micro_batch(model, parallel, is_last=number == NUM_MICRO_BATCHES)
            model(batch, objective, num_tokens=10, current_version=0).loss.backward()
    return {"calls": dict(count.calls), "bytes": dict(count.num_bytes)}


# ---- Activation checkpointing ----------------------------------------------------------------------------------------

RECOMPUTING = ("none", "full", "selective")


def train_recomputing(student: str, world: World, parallel: ParallelConfig) -> dict[str, dict[str, Any]]:
    """The same training, however much of it is computed again."""
    objective = OBJECTIVES["forward_kl"]
    modes = {mode: replace(TRAINING, recompute_activations=mode) for mode in RECOMPUTING}
    return {mode: train(student, objective, world, parallel, training) for mode, training in modes.items()}


# ---- Narrow types ----------------------------------------------------------------------------------------------------

NARROW = {
    "bfloat16": replace(TRAINING, compute_dtype="bfloat16"),
    "tensorwise": replace(TRAINING, float8=Float8Config("tensorwise", emulate=True)),
    "rowwise": replace(TRAINING, float8=Float8Config("rowwise", emulate=True)),
}
NARROW_LAYOUTS = {1: ("alone",), 2: ("fsdp", "tp"), 4: ("fsdp x tp, sequence",)}
# float8 wants multiples of 16 on each process; the heads of two are 32 inputs and outputs.
NARROW_SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def train_narrow(world: World, parallel: ParallelConfig) -> dict[str, dict[str, Any]]:
    """The same training in each of the narrow types; in one process in float32, too."""
    objective = OBJECTIVES["forward_kl"]
    types = NARROW | ({"float32": TRAINING} if world.size == 1 else {})
    return {
        name: train("qwen3", objective, world, parallel, training, **NARROW_SHAPE) for name, training in types.items()
    }


# ---- A world of eight ------------------------------------------------------------------------------------------------

ALL_AXES = ParallelConfig(dp_replicate=2, dp_shard=2, tp=2, sequence_parallel=True)
ALL_AXES_CASES = (("qwen3", "forward_kl"), ("llama tied", "hybrid"))


def train_on_all_axes() -> dict[tuple[str, str], dict[str, Any]]:
    """Two copies, of two shards, of two parts each."""
    with open_world(ALL_AXES) as world:
        return {case: train(case[0], OBJECTIVES[case[1]], world, ALL_AXES) for case in ALL_AXES_CASES}


# ---- All of it -------------------------------------------------------------------------------------------------------


def run_everything(folder: Path) -> dict[str, Any]:
    """Every check of the world that there is."""
    results: dict[str, Any] = {name: {} for name in ("trained", "narrow", "communication", "recomputed")}
    results["loaded"] = load_layouts(folder)
    for layout, parallel in layouts_here().items():
        with open_world(parallel) as world:
            for student, kind in cases_of(layout) if dist.get_world_size() > 1 else ALL_CASES:
                results["trained"][layout, student, kind] = train(student, OBJECTIVES[kind], world, parallel)
            results["communication"][layout] = count_communication("qwen3", world, parallel)
            if layout in NARROW_LAYOUTS[world.size]:
                results["narrow"][layout] = train_narrow(world, parallel)
            if layout in ("fsdp", "tp, sequence"):
                results["recomputed"][layout] = train_recomputing("qwen3", world, parallel)
    return results
