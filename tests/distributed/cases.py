"""What is computed once in one process and once in a world of two: the numbers must agree.

Imported by spawned processes; models and answers are made from seeds.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.helpers.arithmetic import VOCAB_SIZE, make_decoder
from tests.helpers.trajectories import make_trajectories
from titan_opd.cli import main
from titan_opd.config import Objective, SamplingConfig
from titan_opd.config.schema import (
    ArithmeticConfig,
    EvaluationConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainingConfig,
)
from titan_opd.data import PackedBatch, Trajectory, load_tokenizer, pack
from titan_opd.data.arithmetic import arithmetic_prompts
from titan_opd.evaluation import REVERSE_KL, EvaluationResult, Evaluator
from titan_opd.learner import DistillationModel, Learner, equalize
from titan_opd.parallel import World, open_world, parallelize, whole_tensor
from titan_opd.rollout import NativeEngine
from titan_opd.teacher import LabelScorer, NativeScorer, Scorer, TeacherModel
from titan_opd.weights import named_weights

NUM_STEPS = 5
STUDENTS = ("llama", "qwen3")
OBJECTIVES = {
    "forward_kl": Objective(kind="forward_kl"),
    "reverse_kl": Objective(kind="reverse_kl"),
    "policy_gradient": Objective(kind="policy_gradient"),
    "m2po": Objective(kind="policy_gradient", correction="m2po", m2_budget=0.02),
    "decoupled": Objective(kind="policy_gradient", correction="decoupled"),
    "cross_entropy": Objective(kind="cross_entropy"),
}
# With a small eps AdamW's first steps make a step of full size out of the rounding of a gradient of 0.
OPTIMIZER = OptimizerConfig(learning_rate=3e-3, eps=1e-3, weight_decay=0.1, max_grad_norm=0.1)


def run_cases(toml: Path) -> dict[Any, Any]:
    """Everything, in the world that there is."""
    with open_world() as world:
        cases: dict[Any, Any] = {
            (student, kind): train(student, OBJECTIVES[kind], world) for student in STUDENTS for kind in OBJECTIVES
        }
        cases["evaluation"] = evaluation(world)
        cases["refusals"] = [refusal(toml, *option) for option in INDIVISIBLE]
    return cases


def train(student: str, objective: Objective, world: World) -> dict[str, Any]:
    """Gradients of the first batch, metrics of `NUM_STEPS` steps, the weights after them."""
    model = make_model(student, world)
    batches = [make_batches(uneven_trajectories(step), objective, world) for step in range(NUM_STEPS)]
    learner = Learner(model, objective, OPTIMIZER, num_steps=NUM_STEPS, seed=0, world=world)
    batches = [learner.with_proximal_policy(step) for step in batches]
    gradients = first_gradients(model, objective, batches[0], world)
    return {
        "micro-batches": world.gather(len(batches[0])),
        "gradients": gradients,
        "steps": [learner.step(step, current_version=0) for step in batches],
        "weights": dict(named_weights(model.decoder)),
    }


def first_gradients(
    model: DistillationModel, objective: Objective, batches: Sequence[PackedBatch], world: World
) -> dict[str, torch.Tensor]:
    num_tokens = int(world.sum(torch.tensor(sum(len(batch.token_weights) for batch in batches))))
    for batch in equalize(batches, world):
        model(batch, objective, num_tokens=num_tokens, current_version=0).loss.backward()
    gradients = {name: whole_tensor(value.grad) for name, value in model.decoder.named_parameters()}
    model.zero_grad(set_to_none=True)
    return gradients


def evaluation(world: World) -> tuple[dict[str, float], list[str]]:
    """Metrics and answers of an evaluation whose 7 prompts two processes cannot share equally."""
    model = make_model("qwen3", world)
    tokenizer = load_tokenizer("arithmetic")
    _, prompts = arithmetic_prompts(ArithmeticConfig(num_train=1, num_eval=7))
    engine = NativeEngine(
        make_decoder("qwen3", seed=7),
        config=RolloutConfig(max_concurrent=3),
        stop_ids=(1,),
        vocab_size=VOCAB_SIZE,
        max_prompt_tokens=8,
        seed=0,
    )
    evaluator = Evaluator(
        engine=engine,
        prompts=prompts,
        tokenizer=tokenizer,
        student=model,
        teacher=make_scorer(REVERSE_KL),
        evaluation=EvaluationConfig(sampling=SamplingConfig(max_new_tokens=20)),
        training=TrainingConfig(steps=1, tokens_per_microbatch=30),
        world=world,
    )
    result: EvaluationResult = evaluator.run(version=1)
    return result.metrics(), [answer.text for answer in result.answers]


INDIVISIBLE = (
    ("--schedule.batch", "3"),
    ("--schedule.minibatches", "2", "--schedule.batch", "6"),
    ("--schedule.batch", "4", "--data.arithmetic.num_eval", "1"),
)


def refusal(toml: Path, *options: str) -> tuple[int, str]:
    """Exit status and message of a run that two processes cannot share."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        status = main(["train", str(toml), *options, "--dry-run"])
    return status, errors.getvalue()


def make_model(student: str, world: World) -> DistillationModel:
    decoder = make_decoder(student, seed=0)
    model = DistillationModel(decoder, vocab_size=VOCAB_SIZE, logits_chunk_mb=0.001)
    parallelize(model, decoder, world.mesh, TrainingConfig(steps=1), forward_methods=("sweep",))
    return model


def make_scorer(objective: Objective) -> Scorer:
    if objective.kind == "cross_entropy":
        return LabelScorer()
    teacher = make_decoder("llama", seed=1)
    return NativeScorer(
        TeacherModel(teacher), objective, vocab_size=VOCAB_SIZE, top_k=5, tokens_per_forward=64, logits_chunk_mb=0.001
    )


def make_batches(trajectories: Sequence[Trajectory], objective: Objective, world: World) -> list[PackedBatch]:
    """This process's micro-batches."""
    return pack(make_scorer(objective).score(world.share(trajectories)), 30)


def uneven_trajectories(seed: int, num_samples: int = 3) -> list[Trajectory]:
    """Short and long answers in turn: of two processes the second has all the long ones, and more micro-batches."""
    settings = {"vocab_size": VOCAB_SIZE, "num_samples": num_samples, "top_k": 5}
    short = make_trajectories(6, longest=4, seed=2 * seed, **settings)
    long = make_trajectories(6, longest=12, seed=2 * seed + 1, **settings)
    return [trajectory for pair in zip(short, long, strict=True) for trajectory in pair]
