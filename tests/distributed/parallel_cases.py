"""The same training on every layout of processes: what is computed in one process and in worlds of two and four.

Imported by spawned processes; models and answers are made from seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.cases import OPTIMIZER, first_gradients, make_batches, uneven_trajectories
from tests.helpers.arithmetic import VOCAB_SIZE, make_decoder
from titan_opd.config import Objective
from titan_opd.config.schema import OptimizerConfig, ParallelConfig, TrainingConfig
from titan_opd.learner import DistillationModel, Learner
from titan_opd.models import Decoder, DecoderConfig
from titan_opd.parallel import World, init_shards, load_shards, materialize, open_world, parallelize
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


def make_student(name: str) -> Decoder:
    """A random decoder whose norms and biases are drawn, too."""
    shape = STUDENTS[name]
    decoder = make_decoder("llama", seed=0, vocab_size=VOCAB_ROWS, **shape)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in decoder.named_parameters():
            if parameter.ndim == 1:
                offset = 1.0 if "norm" in parameter_name else 0.0
                parameter.normal_(offset, 0.2, generator=generator)
    return decoder


def make_model(
    student: str, mesh: DeviceMesh, parallel: ParallelConfig, training: TrainingConfig = TRAINING
) -> DistillationModel:
    decoder = make_student(student)
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
) -> dict[str, Any]:
    """Gradients of the first batch, metrics of `NUM_STEPS` steps, the weights after them."""
    model = make_model(student, world.mesh, parallel, training)
    # Few, but uneven: of two shares one has more micro-batches than the other.
    batches = [make_batches(uneven_trajectories(step)[:8], objective, world) for step in range(NUM_STEPS)]
    gradients = first_gradients(model, objective, batches[0], world)
    learner = Learner(model, objective, optimizer, num_steps=NUM_STEPS, seed=0, world=world, parallel=parallel)
    return {
        "gradients": gradients,
        "steps": [learner.step(step, current_version=0) for step in batches],
        "weights": dict(named_weights(model.decoder)),
    }


def train_layouts(layouts: Sequence[str] | None = None) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Every student with every objective in every layout of the world that there is."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    results = {}
    for layout, parallel in LAYOUTS.get(size, {"alone": ParallelConfig()}).items():
        if layouts is not None and layout not in layouts:
            continue
        with open_world(parallel) as world:
            for student in STUDENTS:
                for kind, objective in OBJECTIVES.items():
                    results[layout, student, kind] = train(student, objective, world, parallel)
    return results


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
    for layout, parallel in (LAYOUTS[dist.get_world_size()] if dist.is_initialized() else {}).items():
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
                loaded = dict(named_weights(decoder))
                init_shards(decoder, torch.Generator().manual_seed(3))
                results[layout, student] = {
                    "on meta": before,
                    "allocated": count.num_bytes,
                    "own": sum(parameter.to_local().nbytes for parameter in decoder.parameters()),
                    "loaded": loaded,
                    "drawn": dict(named_weights(decoder)),
                }
    return results
