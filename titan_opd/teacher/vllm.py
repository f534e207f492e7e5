"""The teacher in vLLM: whole answers go through it as prompts, and come back with log-probabilities.

vLLM's V2 model runner, that of GPUs, gives the log-probabilities of given ids at each place. The one on a CPU (V1)
gives those of a text's own tokens and of the k most likely ones, so ids that somebody else chose are looked for among
the k, by id. The mass outside the returned ids is what is left of 1, which rounding of float32 makes inexact where it
is below about 1e-6.

Shape suffixes: N response tokens, K candidates a token, F ids that vLLM returns at a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from titan_opd.config.objective import Objective
from titan_opd.config.schema import TeacherConfig
from titan_opd.data.records import ScoredTrajectory, Trajectory
from titan_opd.losses import TeacherScores
from titan_opd.rollout.vllm_setup import engine_arguments, open_llm, require_vllm, sequence_tokens
from titan_opd.rollout.vllm_shape import ModelShape, check_model, check_split
from titan_opd.teacher.native import student_candidates

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput

_MOST_TEXTS = 64  # that vLLM reads at a time


class VllmScorer:
    """Scores trajectories with a vLLM in this process (with `tensor_parallel_size` above 1, in processes of its own).

    Args:
        folder: the teacher in Hugging Face format, of any architecture that vLLM runs.
        objective: decides what is scored, and at which temperature.
        config: of the teacher; its section `vllm`, `dtype`, `top_k` and `tokens_per_forward` are read here.
        vocab_size: tokens of the tokenizer; rows of the vocabulary at or above it have no probability.
        max_tokens: longest prompt and answer together, in tokens.
        device: where it runs.

    Raises:
        ValueError: vLLM is missing, or cannot run this model or this objective.
    """

    def __init__(
        self,
        folder: Path,
        objective: Objective,
        *,
        config: TeacherConfig,
        vocab_size: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        model = ModelShape.from_directory(folder)
        check_model(model, config.dtype, "teacher.dtype", on_cpu=device.type == "cpu")
        check_split(model, config.vllm.tensor_parallel_size, "teacher.vllm.tensor_parallel_size")
        if objective.support == "dense" or objective.kind == "mc_forward_kl":
            raise ValueError(
                f"objective.kind = {objective.kind!r}, support = {objective.support!r} needs whole vocabularies of the "
                "teacher, which vLLM does not hand out; set teacher.engine = 'native'"
            )
        require_vllm("teacher.engine")
        from titan_opd.rollout.vllm_requests import Requests

        self._requests = Requests
        self._support = objective.support
        self._vocab_size = vocab_size
        self._top_k = min(config.top_k, vocab_size)
        self._search_k = min(config.vllm.search_k, vocab_size)
        max_model_len = sequence_tokens(config.vllm, max_tokens + 1)  # vLLM writes a token to each text
        arguments = engine_arguments(
            config.vllm,
            folder=str(folder),
            dtype=config.dtype,
            max_tokens=max_model_len,
            max_concurrent=min(_MOST_TEXTS, config.tokens_per_forward),
            prefix_caching=False,
            max_logprobs=max(self._top_k, self._search_k),
        )
        arguments |= {
            "load_format": "auto",
            "max_num_batched_tokens": config.tokens_per_forward,
            "hf_overrides": {"max_position_embeddings": max(max_model_len, model.max_position_embeddings)},
        }
        if config.vllm.tensor_parallel_size > 1:
            arguments |= {"distributed_executor_backend": "mp"}
        self._llm = open_llm(**arguments)
        if config.vllm.tensor_parallel_size > 1:
            self._llm.collective_rpc("end_with_parent")
        self._takes_ids = self._llm.llm_engine.vllm_config.use_v2_model_runner
        self._llm.collective_rpc("shape_logits", args=(vocab_size, 1 / objective.temperature))

    def score(self, trajectories: Sequence[Trajectory]) -> list[ScoredTrajectory]:
        """Scores for every response token, in the order of `trajectories`.

        Raises:
            ValueError: a token that the student chose is not among those that vLLM returned.
        """
        if not trajectories:
            return []
        outputs = self._llm.generate(
            [{"prompt_token_ids": torch.cat([t.prompt.token_ids, t.response_ids]).tolist()} for t in trajectories],
            [self._parameters(trajectory) for trajectory in trajectories],
            use_tqdm=False,
        )
        return [
            ScoredTrajectory(trajectory, self._read(trajectory, output))
            for trajectory, output in zip(trajectories, outputs, strict=True)
        ]

    def _parameters(self, trajectory: Trajectory) -> SamplingParams:
        if self._support == "teacher_topk":
            return self._requests.prompt_parameters(self._top_k)
        ids_NK, _ = student_candidates(trajectory, self._support)
        if ids_NK.shape[1] == 1 and self._support == "sampled":
            return self._requests.prompt_parameters(0)  # the text's own tokens come in any case
        if self._takes_ids:
            return self._requests.given_ids_parameters(ids_NK, len(trajectory.prompt.token_ids))
        return self._requests.prompt_parameters(self._search_k)

    def _read(self, trajectory: Trajectory, output: RequestOutput) -> TeacherScores:
        if output.prompt_logprobs is not None:
            num_rows = len(trajectory.response_ids)
            ids_NF, logprobs_NF = (rows[-num_rows:] for rows in self._requests.prompt_logprobs(output))
            if self._support == "teacher_topk":
                return self._scores(ids_NF[:, 1:], logprobs_NF[:, 1:])
        ids_NK, behavior_logprobs_NK = student_candidates(trajectory, self._support)
        if output.prompt_logprobs is None:
            logprobs_NK = self._requests.given_ids_logprobs(output)
        else:
            logprobs_NK = find_ids(ids_NK, ids_NF, logprobs_NF, where=f"sample {trajectory.sample.number}")
        return replace(
            self._scores(ids_NK, logprobs_NK),
            behavior_logprobs=behavior_logprobs_NK,
            behavior_support=trajectory.behavior_support,
        )

    def _scores(self, ids_NK: Tensor, logprobs_NK: Tensor) -> TeacherScores:
        tail_N = log_rest(ids_NK, logprobs_NK, self._vocab_size)
        return TeacherScores(ids=ids_NK.clone(), logprobs=logprobs_NK.clone(), tail_logprobs=tail_N)


def find_ids(ids_NK: Tensor, found_ids_NF: Tensor, found_NF: Tensor, *, where: str) -> Tensor:
    """[N, K] the log-probabilities of `ids_NK`, each looked for by its id among those that were returned.

    Args:
        ids_NK: [N, K] int64.
        found_ids_NF: [N, F] int64, in any order; the same id twice has the same value.
        found_NF: [N, F], their log-probabilities.
        where: what the rows are of, for the error.

    Raises:
        ValueError: an id was not returned; it names the id and its place.
    """
    order_NF = found_ids_NF.argsort(dim=1)
    sorted_NF = found_ids_NF.gather(1, order_NF)
    places_NK = torch.searchsorted(sorted_NF, ids_NK.contiguous()).clamp(max=found_ids_NF.shape[1] - 1)
    missing_NK = sorted_NF.gather(1, places_NK) != ids_NK
    if bool(missing_NK.any()):
        row, column = missing_NK.nonzero()[0].tolist()
        raise ValueError(
            f"{where}: the teacher returned no log-probability for token {int(ids_NK[row, column])} at response token "
            f"{row} ({int(missing_NK.sum())} are missing): it is not among its {found_ids_NF.shape[1] - 1} most likely "
            "ones; raise teacher.vllm.search_k, or set teacher.engine = 'native'"
        )
    return found_NF.gather(1, order_NF.gather(1, places_NK))


def log_rest(ids_NK: Tensor, logprobs_NK: Tensor, vocab_size: int) -> Tensor:
    """[N] float32, log(1 - the mass of the ids): of whatever is not among them; an id that stands twice counts once.

    -inf where rounding leaves nothing, or where the ids are the whole vocabulary.
    """
    order_NK = ids_NK.argsort(dim=1)
    sorted_NK = ids_NK.gather(1, order_NK)
    is_again_NK = torch.zeros_like(sorted_NK, dtype=torch.bool)
    is_again_NK[:, 1:] = sorted_NK[:, 1:] == sorted_NK[:, :-1]
    masses_NK = logprobs_NK.gather(1, order_NK).double().exp().masked_fill(is_again_NK, 0.0)
    rest_N = torch.log1p(-masses_NK.sum(dim=1).clamp(max=1.0))
    covers_all_N = (~is_again_NK).sum(dim=1) == vocab_size
    return rest_N.masked_fill(covers_all_N, -torch.inf).float()
