"""Scores of a teacher that several processes share. Imported by spawned processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.distributed.cases import uneven_trajectories
from tests.helpers.arithmetic import VOCAB_SIZE
from titan_opd.config import Objective
from titan_opd.config.schema import ParallelConfig
from titan_opd.models import load_decoder
from titan_opd.parallel import open_world
from titan_opd.teacher import NativeScorer, TeacherModel
from titan_opd.teacher.model import load_sharded_teacher

TEACHERS = ("llama tied", "llama untied", "qwen2", "qwen3")
OBJECTIVES = {
    "teacher's top k": Objective(kind="forward_kl", temperature=0.7),
    "student's top k": Objective(kind="reverse_kl", support="student_topk"),
    "samples": Objective(kind="policy_gradient"),
    "teacher's draws": Objective(kind="mc_forward_kl", support="sampled"),
    "dense": Objective(kind="jsd", support="dense"),
}
LAYOUTS: dict[int, dict[str, ParallelConfig]] = {
    2: {"fsdp": ParallelConfig(), "tp": ParallelConfig(tp=2), "offload": ParallelConfig(cpu_offload=True)},
    4: {
        "tp 4": ParallelConfig(tp=4),
        "fsdp x tp": ParallelConfig(tp=2, sequence_parallel=True),
        "hsdp": ParallelConfig(dp_replicate=2),
    },
}


def score_everything(folder: Path, layouts: dict[str, ParallelConfig] | None) -> dict[Any, list[dict[str, Any]]]:
    """By layout, teacher and objective: the scores of this process's share of the answers. Without layouts: of all,
    by a teacher in this process."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for layout, parallel in ({"whole": ParallelConfig()} if layouts is None else layouts).items():
        with open_world(parallel) as world:
            for teacher in TEACHERS:
                if layouts is None:
                    model = TeacherModel(load_decoder(folder / teacher))
                else:
                    model = load_sharded_teacher(folder / teacher, dtype=torch.float32, parallel=parallel, world=world)
                found[layout, teacher, "held"] = held_share(model)
                for name, objective in OBJECTIVES.items():
                    scorer = NativeScorer(
                        model,
                        objective,
                        vocab_size=VOCAB_SIZE,
                        top_k=5,
                        tokens_per_forward=30,
                        logits_chunk_mb=0.001,
                        num_samples=20,
                        world=None if layouts is None else world,
                    )
                    # Neighbours in turn short and long: of two shares one has more passes than the other.
                    scored = scorer.score(world.share(uneven_trajectories(seed=5, num_samples=3)))
                    found[layout, teacher, name] = [fields(one.scores) for one in scored]
    return found


def held_share(model: TeacherModel) -> float:
    """Of the elements of all matrices, how many are in this process's memory."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    held = [one.to_local() if isinstance(one, DTensor) else one for one in matrices]
    return sum(one.numel() for one in held) / sum(math.prod(one.shape) for one in matrices)


def fields(scores: Any) -> dict[str, Any]:
    kept = {name: getattr(scores, name) for name in ("ids", "logprobs", "tail_logprobs", "hidden", "lm_head_weight")}
    return {name: value.clone() for name, value in kept.items() if value is not None}
