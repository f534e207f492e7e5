"""A sample as a request to vLLM, and vLLM's output as a trajectory: token ids in, token ids out.

Shape suffixes: N response tokens, K recorded candidates, m Monte Carlo samples, M kept candidates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from titan_opd.config.schema import SamplingConfig
from titan_opd.data.records import Sample, Trajectory
from titan_opd.models import DecoderConfig
from titan_opd.ops.noise import derive_seed
from titan_opd.rollout.engine import Recording
from titan_opd.rollout.requests import check_recording, check_samples, check_stop_ids, check_vocabulary
from titan_opd.rollout.running import stack_ragged
from titan_opd.rollout.vllm_draws import draw_arguments, draw_settings, unpack_records
from titan_opd.rollout.vllm_setup import MAX_LOGPROBS


def needs_draws(sampling: SamplingConfig, recording: Recording) -> bool:
    """Whether tokens are drawn by `vllm_draws`: vLLM's own sampler does not tell all that has to be recorded."""
    return recording.num_samples > 1 or sampling.truncated


class Requests:
    """Makes and reads the requests of one engine.

    Args:
        model: the student's shape.
        stop_ids: tokens that end an answer, beside `SamplingConfig.stop_ids`.
        vocab_size: number of the tokenizer's tokens.
        max_prompt_tokens: longest prompt.
        max_model_len: most tokens of a sequence in the engine.
        seed: of the noise.
        draws: whether the engine has the logits processor of `vllm_draws`.

    Raises:
        ValueError: the tokenizer has more tokens than the model, or a stop token that can never be sampled.
    """

    def __init__(
        self,
        model: DecoderConfig,
        *,
        stop_ids: Collection[int],
        vocab_size: int,
        max_prompt_tokens: int,
        max_model_len: int,
        seed: int,
        draws: bool,
    ) -> None:
        check_vocabulary(vocab_size, model)
        check_stop_ids(stop_ids, vocab_size)
        self._stop_ids = frozenset(stop_ids)
        self._vocab_size = vocab_size
        self._max_prompt_tokens = max_prompt_tokens
        self._context = min(max_model_len, model.max_position_embeddings)
        self._seed = seed
        self._draws = draws

    def check(
        self,
        samples: Sequence[Sample],
        sampling: SamplingConfig,
        recording: Recording,
        in_flight: Iterable[Sample] = (),
    ) -> None:
        """Raise a ValueError when samples cannot be answered under these settings."""
        check_stop_ids(self._stops(sampling), self._vocab_size)
        if needs_draws(sampling, recording) and not self._draws:
            raise ValueError(
                f"{sampling} with {recording} needs records that vLLM's own sampler does not make; build the engine "
                "with draws = True"
            )
        check_recording(recording, sampling)
        if recording.top_k > MAX_LOGPROBS:
            raise ValueError(f"{recording.top_k} candidates a token were asked for; {MAX_LOGPROBS} is the most")
        check_samples(
            samples,
            in_flight,
            vocab_size=self._vocab_size,
            max_prompt_tokens=self._max_prompt_tokens,
            max_new_tokens=sampling.max_new_tokens,
            context=self._context,
        )

    def parameters(
        self, sample: Sample, sampling: SamplingConfig, recording: Recording, *, key: str, **more: Any
    ) -> SamplingParams:
        """vLLM's settings for one sample.

        Args:
            sample: its number keys the noise, so an answer does not depend on the others.
            sampling, recording: as asked.
            key: of the records, unique among requests.
            more: further fields of `SamplingParams`.
        """
        plain = {
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": sorted(self._stops(sampling)),
            "ignore_eos": True,  # what ends an answer is in stop_token_ids
            "detokenize": False,
            "flat_logprobs": True,
            **more,
        }
        if needs_draws(sampling, recording):
            settings = draw_settings(sampling, recording, vocab_size=self._vocab_size, seed=self._seed)
            return SamplingParams(temperature=0.0, extra_args=draw_arguments(key, sample.number, settings), **plain)
        return SamplingParams(
            temperature=sampling.temperature,
            seed=derive_seed(self._seed, f"sample {sample.number}") >> 1,  # of 63 bits
            logprobs=min(recording.top_k, self._vocab_size),  # the written token's comes on top
            **plain,
        )

    def trajectory(
        self,
        sample: Sample,
        sampling: SamplingConfig,
        recording: Recording,
        output: CompletionOutput,
        *,
        records: dict[str, Any] | None,
        policy_versions: Tensor,
        kv_versions: Tensor | None,
    ) -> Trajectory:
        """The finished answer to a sample.

        Args:
            sample, sampling, recording: of the request.
            output: what vLLM wrote.
            records: what `vllm_draws` recorded for it; None when vLLM drew.
            policy_versions, kv_versions: [N] int32.

        Raises:
            ValueError: vLLM broke the answer off, or gave another one than it recorded.
        """
        ids_N = torch.tensor(output.token_ids, dtype=torch.int64)
        if output.finish_reason not in ("stop", "length") or not len(ids_N):
            raise ValueError(
                f"vLLM broke the answer to sample {sample.number} off after {len(ids_N)} tokens: "
                f"{output.finish_reason!r}"
            )
        if needs_draws(sampling, recording):
            fields = self._recorded(sample, ids_N, records)
        else:
            fields = _written(sample, ids_N, output.logprobs, sampling, recording, self._vocab_size)
        return Trajectory(
            sample=sample,
            response_ids=ids_N,
            policy_versions=policy_versions,
            finish_reason="stop" if int(ids_N[-1]) in self._stops(sampling) else "length",
            sampling=sampling,
            kv_versions=None if kv_versions is None or torch.equal(kv_versions, policy_versions) else kv_versions,
            **fields,
        )

    @staticmethod
    def prompt_parameters(num_candidates: int) -> SamplingParams:
        """For the log-probabilities of a whole text: of its own tokens, and of `num_candidates` more at each."""
        return SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, prompt_logprobs=num_candidates, flat_logprobs=True
        )

    @staticmethod
    def given_ids_parameters(ids_NK: Tensor, num_prompt: int) -> SamplingParams:
        """For the log-probabilities of given ids [N, K] at the N tokens that follow the first `num_prompt` of a text.

        For vLLM's V2 model runner.
        """
        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            detokenize=False,
            prompt_logprob_token_ids=ids_NK.numpy(),
            prompt_logprob_start=num_prompt - 1,  # where the first of these tokens is predicted
        )

    @staticmethod
    def given_ids_logprobs(output: RequestOutput) -> Tensor:
        """[N, K] float32, what `given_ids_parameters` asked for."""
        return torch.as_tensor(output.prompt_token_id_logprobs, dtype=torch.float32)

    @staticmethod
    def prompt_logprobs(output: RequestOutput) -> tuple[Tensor, Tensor]:
        """Ids and log-probabilities, [T - 1, 1 + K], for each token of the text but the first.

        Column 0 is the token itself, then come the K most likely ones.
        """
        found = output.prompt_logprobs
        num_rows = len(output.prompt_token_ids) - 1
        ids = torch.tensor(found.token_ids, dtype=torch.int64).view(num_rows, -1)
        return ids, torch.tensor(found.logprobs, dtype=torch.float32).view(num_rows, -1)

    def _stops(self, sampling: SamplingConfig) -> frozenset[int]:
        return self._stop_ids | set(sampling.stop_ids)

    def _recorded(self, sample: Sample, ids_N: Tensor, records: dict[str, Any] | None) -> dict[str, Tensor]:
        if records is None:
            raise ValueError(f"sample {sample.number} has no records of its draws: was it answered by this engine?")
        rows = {name: column[: len(ids_N)] for name, column in unpack_records(records).items()}
        drawn_N = torch.stack(rows.pop("token_ids"))
        if not torch.equal(drawn_N, ids_N):
            raise ValueError(
                f"sample {sample.number}: vLLM wrote {ids_N.tolist()}, and {drawn_N.tolist()} was drawn; the logits "
                "processor is not the last of its sampler"
            )
        fields = {"behavior_logprobs": torch.stack(rows.pop("logprobs"))}
        if "support" in rows:
            fields["behavior_support"] = stack_ragged(rows.pop("support"))
        return fields | {name: torch.stack(column) for name, column in rows.items()}


def _written(
    sample: Sample,
    ids_N: Tensor,
    logprobs: FlatLogprobs,
    sampling: SamplingConfig,
    recording: Recording,
    vocab_size: int,
) -> dict[str, Tensor]:
    """The fields of a trajectory from what vLLM's sampler says: the written token first, then the most likely ones."""
    top_k = min(recording.top_k, vocab_size)
    found_ids_NK = torch.tensor(logprobs.token_ids, dtype=torch.int64).view(len(ids_N), 1 + top_k)
    found_NK = torch.tensor(logprobs.logprobs, dtype=torch.float32).view(len(ids_N), 1 + top_k)
    if not torch.equal(found_ids_NK[:, 0], ids_N):
        raise ValueError(f"sample {sample.number}: vLLM gives log-probabilities of other tokens than it wrote")
    behavior_N = found_NK[:, 0].clone()
    if sampling.temperature == 0:  # a point mass; vLLM gives the value at temperature 1
        behavior_N = torch.zeros_like(behavior_N)
    fields = {"behavior_logprobs": behavior_N}
    if recording.num_samples:
        fields |= {"sampled_ids": ids_N[:, None].clone(), "sampled_logprobs": behavior_N[:, None].clone()}
    if top_k:
        fields |= {"topk_ids": found_ids_NK[:, 1:].clone(), "topk_logprobs": found_NK[:, 1:].clone()}
    return fields
