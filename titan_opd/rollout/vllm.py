"""`VllmEngine`: vLLM in the trainer's own processes, which writes while the trainer waits.

The engine is vLLM's `LLM` under `distributed_executor_backend="external_launcher"`: it joins the trainer's process
group and takes the trainer's tensors as they are. An engine lives in one process, or in `tensor_parallel_size`
neighbouring ones, its members. Each member has a scheduler of its own, so all must be asked the same in the same order:
`generate` pools what the members are asked and gives each of them the answers to its own samples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from titan_opd.config.schema import RolloutConfig, SamplingConfig
from titan_opd.data.records import Sample, Trajectory
from titan_opd.models import DecoderConfig
from titan_opd.rollout.engine import RECORD_NOTHING, Recording
from titan_opd.rollout.update import NamedTensors
from titan_opd.rollout.vllm_members import join_members
from titan_opd.rollout.vllm_setup import log_quantized, open_llm, prepare_engine
from titan_opd.weights.pieces import Piece, WeightSpec

if TYPE_CHECKING:
    from titan_opd.rollout.vllm_weights import VllmUpdate


class VllmEngine:
    """Writes whole batches with the newest weights; a `RolloutEngine`.

    All members of an engine make the same calls in the same order.

    Args:
        model: the student's shape.
        config: of the rollout; its section `vllm`, `dtype` and `max_concurrent` are read here.
        stop_ids: tokens that end an answer, beside `SamplingConfig.stop_ids`.
        vocab_size: number of the tokenizer's tokens; rows of the vocabulary at or above it do not exist in the engine.
        max_prompt_tokens: longest prompt, in tokens.
        max_new_tokens: longest answer, in tokens.
        seed: of the sampler's noise. A sample's answer depends on it and on the sample's number.
        draws: whether requests can ask for Monte Carlo samples or truncated sampling (`vllm_draws`).
        device: where it runs.

    Raises:
        ValueError: vLLM is missing, or cannot run this model or these settings here.
    """

    takes_rows = False  # of `titan_opd.weights.target.WeightTarget`: whole parameters only

    def __init__(
        self,
        model: DecoderConfig,
        *,
        config: RolloutConfig,
        stop_ids: Collection[int],
        vocab_size: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
        seed: int,
        draws: bool,
        device: torch.device,
    ) -> None:
        check_colocated(config, device)
        self._members = join_members(config.vllm.tensor_parallel_size)
        prepared = prepare_engine(
            model,
            config=config,
            stop_ids=stop_ids,
            vocab_size=vocab_size,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            seed=seed,
            draws=draws,
            prefix_caching=True,
            device=device,
        )
        self._requests, self._folder = prepared.requests, prepared.folder
        from titan_opd.rollout.vllm_weights import VllmWeights

        self._sleeps = config.vllm.sleep
        self._awake = {"weights", "kv_cache"}
        self._llm = open_llm(logprobs_mode="processed_logprobs", enable_sleep_mode=self._sleeps, **prepared.arguments)
        log_quantized(self._llm.collective_rpc("quantized_layers")[0], config.vllm.quantization)
        (self._layerwise,) = self._llm.collective_rpc("layerwise_update")
        self._weights = VllmWeights(model, getattr(torch, config.dtype), self, config.quantization)

    @property
    def policy_version(self) -> int:
        """Of the weights that write the next token."""
        return self._weights.version

    def generate(
        self, samples: Sequence[Sample], sampling: SamplingConfig, recording: Recording = RECORD_NOTHING
    ) -> list[Trajectory]:
        """One answer for each sample, in the order of `samples`.

        Args:
            samples: what to answer. Those of other members may be others, or the same ones under the same numbers.
            sampling: how tokens are drawn; `stop_ids` are joined with the engine's own.
            recording: what to write down beside the token and its log-probability.

        Raises:
            ValueError: a prompt is empty or too long, the settings cannot be met, or there are no complete weights.
        """
        self._weights.check()
        pooled = self._members.pool(samples)
        self._requests.check(pooled, sampling, recording)
        if not pooled:
            return []
        answers = {answer.sample.number: answer for answer in self._write(pooled, sampling, recording)}
        return [answers[sample.number] for sample in samples]

    def _write(self, samples: Sequence[Sample], sampling: SamplingConfig, recording: Recording) -> Iterator[Trajectory]:
        self._wake({"weights", "kv_cache"})
        keys = [f"sample-{sample.number}" for sample in samples]
        outputs = self._llm.generate(
            [{"prompt_token_ids": sample.prompt.token_ids.tolist()} for sample in samples],
            [
                self._requests.parameters(sample, sampling, recording, key=key)
                for sample, key in zip(samples, keys, strict=True)
            ],
            use_tqdm=False,
        )
        (records,) = self._llm.collective_rpc("take_draws", args=(keys,))
        if self._sleeps:
            self._llm.sleep(level=1)
            self._awake = set()
        for sample, output, record in zip(samples, outputs, records, strict=True):
            num_tokens = len(output.outputs[0].token_ids)
            yield self._requests.trajectory(
                sample,
                sampling,
                recording,
                output.outputs[0],
                records=record,
                policy_versions=torch.full((num_tokens,), self.policy_version, dtype=torch.int32),
                kv_versions=None,
            )

    # ---- Weights -----------------------------------------------------------------------------------------------------

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Write all weights of policy version `version` into the engine's own storage.

        A failure before the first tensor leaves the old version in service; after it nothing is written until a
        complete update. All processes of the trainer call it together, for gathering a sharded tensor takes them all.

        Raises:
            ValueError: a name is unknown, comes twice or is missing, a shape or type does not fit, or the version
                would fall.
        """
        self._weights.load(named_tensors, version)

    def weight_specs(self) -> dict[str, WeightSpec]:
        """What a complete update consists of."""
        return self._weights.specs()

    def update_weights(self, version: int) -> AbstractContextManager[VllmUpdate]:
        """Put in the weights of policy version `version` piece by piece; see `titan_opd.weights.target`.

        Raises:
            ValueError: the version would fall, or the pieces do not make up all weights.
        """
        return self._weights.open(version)

    def begin(self) -> None:
        """Of `vllm_weights.Carrier`, as all until `logprobs`: the engine is its own way to its model."""
        self._wake({"weights"})
        self._layerwise.begin()

    def send(self, pieces: Sequence[Piece]) -> None:
        self._layerwise.take(pieces)

    def finish(self, version: int) -> None:
        self._layerwise.finish()
        self._llm.reset_prefix_cache()

    def resume(self) -> None:
        """Nothing waits: whoever calls `load_weights` does not call `generate` meanwhile."""

    def digests(self) -> Mapping[str, int]:
        return self._members.agreed_digests(self._layerwise.digests)

    def logprobs(self, token_ids: list[int]) -> Tensor:
        self._wake({"weights", "kv_cache"})
        request = self._requests.prompt_parameters(0)
        (output,) = self._llm.generate([{"prompt_token_ids": token_ids}], request, use_tqdm=False)
        return self._requests.prompt_logprobs(output)[1][:, 0]

    def _wake(self, tags: set[str]) -> None:
        missing = sorted(tags - self._awake)
        if missing:
            self._llm.wake_up(tags=missing)
            self._awake |= tags


def check_colocated(config: RolloutConfig, device: torch.device) -> None:
    """Raise a ValueError when the settings do not fit an engine inside the trainer's processes."""
    if config.vllm.sleep and device.type == "cpu":
        raise ValueError(
            "rollout.vllm.sleep = true frees a GPU's memory between rollouts; on a CPU vLLM passes over it and would "
            "free nothing: leave it out"
        )
