"""Trainers with vLLM in their own processes, for the tests of its updates. Imported by spawned processes."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from tests.distributed.weight_cases import make_outlets, make_receiver, make_store
from tests.engines.writing import VOCAB_SIZE, make_decoder, make_samples
from tests.helpers.trajectories import make_trajectories
from tests.helpers.vllm import CPU, NUM_ROWS, recomputed_logprobs, rollout_config
from titan_opd.channel import ZmqTransport
from titan_opd.config import Objective
from titan_opd.config.schema import (
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RolloutVllmConfig,
    SamplingConfig,
    TeacherConfig,
    TeacherVllmConfig,
    TrainingConfig,
)
from titan_opd.data import pack
from titan_opd.data.records import Sample, Trajectory
from titan_opd.learner import DistillationModel, Learner
from titan_opd.models import Decoder, load_decoder, save_checkpoint_files
from titan_opd.parallel import World, open_world, parallelize
from titan_opd.rollout import NativeEngine, Recording
from titan_opd.rollout.vllm import VllmEngine
from titan_opd.rollout.vllm_setup import engine_arguments, open_llm
from titan_opd.teacher import LabelScorer
from titan_opd.teacher.vllm import VllmScorer
from titan_opd.weights import named_weights
from titan_opd.weights.direct import DirectDelivery
from titan_opd.weights.errors import VerificationError
from titan_opd.weights.pieces import Piece
from titan_opd.weights.probe import TrainerProbe
from titan_opd.weights.publisher import WeightPublisher
from titan_opd.weights.receiver import Checks
from titan_opd.weights.source import WeightSource
from titan_opd.weights.transports import InProcess

GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=12)
WARM = SamplingConfig(temperature=0.7, max_new_tokens=12)
BUCKET_BYTES = 20_000  # several of them, and matrices that are larger than one
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=0)
LAYOUTS = {"1x1": ParallelConfig(), "2x1": ParallelConfig(), "1x2": ParallelConfig(tp=2)}
FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Case:
    """A student, its trainer's layout (FSDP x TP), and the processes of an engine."""

    family: str
    tied: bool
    trainer: str
    num_members: int

    def __str__(self) -> str:
        kind = "tied" if self.tied else "untied"
        return f"{self.family}, {kind}, trainer {self.trainer}, engine {self.num_members}"

    def student(self) -> Decoder:
        """A random one, norms and biases drawn too; its vocabulary of 101 rows does not divide."""
        # vLLM reads no head_dim of Qwen2: it is the hidden size over the heads.
        shape = {"model_type": self.family, "hidden_size": 128, "head_dim": 32}
        decoder = make_decoder(seed=0, tie_word_embeddings=self.tied, **shape)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                if parameter.ndim == 1:
                    parameter.normal_(float(name.endswith("norm.weight")), 0.2, generator=generator)
        return decoder


class Trainer:
    """A student that learns random texts by heart, together with the other processes of `world`."""

    def __init__(self, student: Decoder, world: World, parallel: ParallelConfig) -> None:
        self.student = student
        self._world = world
        self.model = DistillationModel(student, vocab_size=VOCAB_SIZE, logits_chunk_mb=1.0)
        parallelize(self.model, student, world.mesh, TrainingConfig(steps=1), parallel)
        objective = Objective(kind="cross_entropy")
        self._learner = Learner(self.model, objective, OPTIMIZER, num_steps=9, seed=0, world=world, parallel=parallel)
        self.source = WeightSource(student, dtype=torch.float32, bucket_bytes=BUCKET_BYTES, timeout=60)
        self.probe = TrainerProbe(
            self.model, vocab_size=VOCAB_SIZE, engine_dtype=torch.float32, compute_dtype=torch.float32
        )

    def step(self, number: int) -> None:
        texts = self._world.share(make_trajectories(8, vocab_size=VOCAB_SIZE, seed=number))
        self._learner.step(pack(LabelScorer().score(texts), 200), current_version=0)

    def export(self, folder: Path) -> Path:
        """The present student in Hugging Face format, the same folder in all processes."""
        weights = dict(named_weights(self.student))
        if self._world.is_main:
            folder.mkdir(parents=True)
            save_checkpoint_files(weights.items(), self.student.config, folder)
        self._world.barrier()
        return folder


@dataclass(frozen=True)
class Reading:
    """What an engine says: greedy answers, and the log-probabilities of fixed texts."""

    tokens: list[list[int]]
    logprobs: torch.Tensor

    def gap(self, other: Reading) -> float:
        """The largest difference of a token's log-probability."""
        return float((self.logprobs - other.logprobs).abs().max())


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in (31, 17, 24)]


def read(engine: Any) -> Reading:
    """Of one of this package's engines."""
    answers = engine.generate(make_samples(6), GREEDY)
    return Reading(
        [one.response_ids.tolist() for one in answers], torch.cat([engine.logprobs(text) for text in texts()])
    )


def read_fresh(folder: Path, num_members: int = 1) -> Reading:
    """Of a vLLM that has loaded a checkpoint by itself, over the tokens of the tokenizer."""
    from vllm import SamplingParams

    from titan_opd.rollout.vllm_requests import Requests

    options = RolloutVllmConfig(kv_cache_mb=8, tensor_parallel_size=num_members)
    common = {"dtype": "float32", "max_tokens": 128, "max_concurrent": 8, "prefix_caching": False}
    llm = open_llm(**engine_arguments(options, folder=str(folder), **common) | {"load_format": "auto"})
    llm.collective_rpc("shape_logits", args=(VOCAB_SIZE, 1.0))
    greedy = SamplingParams(temperature=0.0, max_tokens=GREEDY.max_new_tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": sample.prompt.token_ids.tolist()} for sample in make_samples(6)]
    answers = llm.generate(prompts, greedy, use_tqdm=False)
    found = llm.generate(
        [{"prompt_token_ids": text} for text in texts()], Requests.prompt_parameters(0), use_tqdm=False
    )
    logprobs = torch.cat([Requests.prompt_logprobs(output)[1][:, 0] for output in found])
    return Reading([list(answer.outputs[0].token_ids) for answer in answers], logprobs)


def make_engine(student: Decoder, num_members: int, **changes: Any) -> VllmEngine:
    """Nothing ends an answer but its length."""
    options = RolloutVllmConfig(kv_cache_mb=8, tensor_parallel_size=num_members)
    settings = {
        "config": rollout_config(vllm=options),
        "stop_ids": [],
        "vocab_size": VOCAB_SIZE,
        "max_prompt_tokens": 16,
        "max_new_tokens": 12,
        "seed": 0,
        "draws": False,
        "device": CPU,
    }
    return VllmEngine(student.config, **settings | changes)


# ---- Updates against fresh engines -----------------------------------------------------------------------------------


def follow(cases: Sequence[Case], folder: Path, num_steps: int) -> dict[str, list[dict[str, Any]]]:
    """For each case what there is to say of its engine after each of `num_steps` optimizer steps."""
    found = {}
    num_members = cases[0].num_members
    for case in sorted(cases, key=lambda one: one.num_members):
        if case.num_members != num_members:
            _forget_groups()
            num_members = case.num_members
        with open_world(LAYOUTS[case.trainer]) as world:
            found[str(case)] = list(_follow(case, world, folder / str(case), num_steps))
        gc.collect()
    return found


def follow_and_share(cases: Sequence[Case], folder: Path, num_steps: int) -> dict[str, Any]:
    """`follow` and `share_an_engine`, in processes that have to import vLLM only once; ends with two members."""
    return {"cases": follow(cases, folder, num_steps), "shared": share_an_engine()}


def _follow(case: Case, world: World, folder: Path, num_steps: int) -> Iterator[dict[str, Any]]:
    trainer = Trainer(case.student(), world, LAYOUTS[case.trainer])
    engine = make_engine(trainer.student, case.num_members)
    delivery = DirectDelivery(trainer.source, worker="trainer", checks=Checks())
    delivery.deliver(engine, 0, probe=trainer.probe())
    before = read(engine)
    for step in range(1, num_steps + 1):
        trainer.step(step)
        delivery.deliver(engine, step, probe=trainer.probe())
        exported = trainer.export(folder / str(step))
        now, fresh = read(engine), read_fresh(exported, case.num_members)
        yield {
            "same tokens": now.tokens == fresh.tokens,
            "gap": now.gap(fresh),
            "gap to trainer": _gap_to_trainer(now, exported),
            "moved": now.gap(before),
        }
        before = now


def _gap_to_trainer(now: Reading, exported: Path) -> float:
    answers = []
    for number, text in enumerate(texts()):
        sample = make_samples(1)[0]
        prompt = type(sample.prompt)("text", torch.tensor(text[:1]))
        versions = torch.zeros(len(text) - 1, dtype=torch.int32)
        answers.append(Trajectory(Sample(number, 0, 0, prompt), torch.tensor(text[1:]), versions, "stop"))
    expected = torch.cat(recomputed_logprobs(load_decoder(exported), answers))
    return float((now.logprobs - expected).abs().max())


def _forget_groups() -> None:
    """Let vLLM divide the processes anew: it does so once in a process, and a run never needs more."""
    from vllm.distributed.parallel_state import destroy_model_parallel

    destroy_model_parallel()


# ---- Published for engines in other processes ------------------------------------------------------------------------


class Published:
    """A trainer's and an engine's end of the weights, in one process.

    Args:
        student: whose weights are published.
        transport: how they go.
        memory: an empty folder on a file system in memory.
    """

    def __init__(self, student: Decoder, transport: str, memory: Path) -> None:
        self.channel = ZmqTransport()
        self.store = make_store(self.channel)
        self.local = InProcess()
        outlets = [self.local] if transport == "in_process" else make_outlets(transport, self.store, memory)
        source = WeightSource(student, dtype=torch.float32, bucket_bytes=BUCKET_BYTES, timeout=60)
        self.publisher = WeightPublisher(source, outlets, self.store, bucket_bytes=BUCKET_BYTES)
        self.receiver = make_receiver(transport, "rollout-0", local=self.local if transport == "in_process" else None)
        self.version = 0

    def publish(self, version: int) -> None:
        self.version = version
        self.publisher.publish(version)

    def flip_byte(self, folder: Path) -> None:
        """Of the first tensor, the embedding, where it lies in shared memory under `folder`."""
        with min(folder.rglob(f"{self.version}-*")).open("r+b") as file:
            file.seek(5)
            byte = file.read(1)[0]
            file.seek(5)
            file.write(bytes([byte ^ 4]))

    def take(self, engine: Any) -> None:
        self.receiver.take(engine, self.store.address, self.version)

    def update(self, engine: Any) -> None:
        """A new version, from the parameters into the engine."""
        self.publish(max(engine.policy_version, self.version) + 1)
        self.take(engine)


@contextmanager
def published(trainer: Trainer, transport: str, memory: Path, *, student: Decoder | None = None) -> Iterator[Published]:
    """The weights of a trainer, or of another student in its place."""
    ends = Published(student or trainer.student, transport, memory)
    try:
        yield ends
    finally:
        ends.receiver.close()
        ends.publisher.close()
        ends.store.close()


# ---- One engine in two processes -------------------------------------------------------------------------------------


SHARED = Case("qwen3", True, "2x1", 2)
OWN_DRAWS = Recording(num_samples=3)


def native_answers() -> dict[int, list[int]]:
    """The answers of the native engine with this package's draws."""
    engine = NativeEngine(
        SHARED.student(), config=RolloutConfig(), stop_ids=[], vocab_size=VOCAB_SIZE, max_prompt_tokens=16, seed=0
    )
    return {one.sample.number: one.response_ids.tolist() for one in engine.generate(make_samples(9), WARM, OWN_DRAWS)}


def share_an_engine() -> dict[str, Any]:
    """What two processes find that have one engine: their answers, and a damaged byte at one of them."""
    rank = dist.get_rank()
    student = SHARED.student()
    engine = make_engine(student, 2, draws=True)
    engine.load_weights(student.named_parameters(), 0)
    found: dict[str, Any] = {"written": []}
    samples = make_samples(9)
    for recording in (Recording(top_k=3), OWN_DRAWS):
        for mine in (samples[rank::2], samples[:5], samples[:4] if rank else []):
            answers = engine.generate(mine, WARM, recording)
            assert [one.sample.number for one in answers] == [one.number for one in mine]
            found["written"].append({one.sample.number: one.response_ids.tolist() for one in answers})
            expected = recomputed_logprobs(student, answers, temperature=WARM.temperature) if answers else []
            for answer, logprobs in zip(answers, expected, strict=True):
                torch.testing.assert_close(answer.behavior_logprobs, logprobs, atol=1e-4, rtol=0)
    found["damage"] = _damage_at_one(engine, student, rank)
    return found


def _damage_at_one(engine: VllmEngine, student: Decoder, rank: int) -> dict[str, Any]:
    """A byte that changes on its way into the second process: neither writes until the next update."""
    before = engine.generate(make_samples(3), WARM)
    send = engine.send

    def damaged(pieces: list[Piece]) -> None:
        copy = pieces[0].tensor.clone()
        copy.view(-1).view(torch.uint8)[5] ^= 1
        send([Piece(pieces[0].name, 0, copy), *pieces[1:]])

    if rank == 1:
        engine.send = damaged
    errors = []
    for attempt in (
        lambda: engine.load_weights(student.named_parameters(), 1),
        lambda: engine.generate(make_samples(1), WARM),
    ):
        try:
            attempt()
        except (VerificationError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    engine.send = send
    engine.load_weights(student.named_parameters(), 1)
    after = engine.generate(make_samples(3), WARM)
    same = [one.response_ids.tolist() for one in after] == [one.response_ids.tolist() for one in before]
    return {"errors": errors, "healed": same}


# ---- Teachers of other architectures ---------------------------------------------------------------------------------


def score_foreign(kind: str, folder: str) -> None:
    """Scores by a vLLM teacher that this package's decoder cannot be, against transformers."""
    shape = {
        "vocab_size": NUM_ROWS,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
    }
    config = {
        "mistral": lambda: transformers.MistralConfig(**shape, sliding_window=None),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **shape, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True
        ),
    }[kind]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    scorer = VllmScorer(
        Path(folder),
        Objective(kind="forward_kl", support="teacher_topk"),
        config=TeacherConfig(
            engine="vllm", path=folder, top_k=7, tokens_per_forward=64, vllm=TeacherVllmConfig(kv_cache_mb=8)
        ),
        vocab_size=VOCAB_SIZE,
        max_tokens=60,
        device=CPU,
    )
    answers = make_trajectories(8, vocab_size=VOCAB_SIZE, longest=30)
    for answer, one in zip(answers, scorer.score(answers), strict=True):
        text = torch.cat([answer.prompt.token_ids, answer.response_ids])
        with torch.no_grad():
            logits = model(text[None]).logits[0, len(answer.prompt.token_ids) - 1 : -1, :VOCAB_SIZE]
        expected = logits.log_softmax(-1)
        torch.testing.assert_close(one.scores.logprobs, expected.topk(7).values, atol=1e-4, rtol=0)
        torch.testing.assert_close(expected.gather(1, one.scores.ids), one.scores.logprobs, atol=1e-4, rtol=0)
