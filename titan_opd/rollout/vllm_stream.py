"""`VllmStream`: vLLM in processes of its own, which writes all the time while this one steers it.

The engine is vLLM's `AsyncLLM` (`vllm_process`): what is submitted is written whether anybody calls `step` or not. New
weights go in between two of its steps (`pause_generation(mode="keep")`).

Shape suffix: N response tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titan_opd.config.schema import RolloutConfig, SamplingConfig
from titan_opd.data.records import Sample, Trajectory
from titan_opd.models import DecoderConfig
from titan_opd.rollout.engine import RECORD_NOTHING, Recording
from titan_opd.rollout.update import NamedTensors
from titan_opd.rollout.vllm_setup import prepare_engine
from titan_opd.weights.pieces import Piece, WeightSpec

if TYPE_CHECKING:
    from titan_opd.rollout.vllm_weights import VllmUpdate

logger = logging.getLogger(__name__)
_STEP_SECONDS = 0.05  # how long `step` waits for an answer to end


@dataclass(eq=False)
class _Writing:
    """One submitted sample.

    Attributes:
        sample: what is asked.
        key: of its request.
        version: in service when it was submitted: the oldest that computed anything of it.
        marks: (tokens written, version from there on), one for each update since.
        task: that waits for its end.
    """

    sample: Sample
    key: str
    version: int
    marks: list[tuple[int, int]] = field(default_factory=list)
    task: asyncio.Task | None = None


class VllmStream:
    """Writes answers with a vLLM that runs beside this process; a `StreamingEngine`.

    Args:
        model: the student's shape.
        config: of the rollout; its section `vllm`, `dtype` and `max_concurrent` are read here.
        stop_ids: tokens that end an answer, beside `SamplingConfig.stop_ids`.
        vocab_size: number of the tokenizer's tokens; rows of the vocabulary at or above it do not exist in the engine.
        max_prompt_tokens: longest prompt, in tokens.
        max_new_tokens: longest answer, in tokens.
        seed: of the sampler's noise. A sample's answer depends on it, on the sample's number and on the weights.
        draws: whether requests can ask for Monte Carlo samples or truncated sampling (`vllm_draws`).
        recompute_kv: after an update, compute the keys and values of all running sequences anew. Otherwise the old
            ones stay, `Trajectory.kv_versions` says where, and equal prompts do not share theirs.
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
        recompute_kv: bool,
        device: torch.device,
    ) -> None:
        prepared = prepare_engine(
            model,
            config=config,
            stop_ids=stop_ids,
            vocab_size=vocab_size,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            seed=seed,
            draws=draws,
            prefix_caching=recompute_kv,
            device=device,
        )
        self._requests, self._folder = prepared.requests, prepared.folder
        from titan_opd.rollout.vllm_process import VllmProcess
        from titan_opd.rollout.vllm_weights import VllmWeights

        self._max_concurrent = config.max_concurrent
        self._recompute_kv = recompute_kv
        self._draws = draws
        self._settings: tuple[SamplingConfig, Recording] | None = None
        self._writing: dict[int, _Writing] = {}
        self._ended: queue.SimpleQueue[tuple[_Writing, Trajectory | BaseException]] = queue.SimpleQueue()
        self._keys = itertools.count()
        self._weights = VllmWeights(model, getattr(torch, config.dtype), self, config.quantization)
        try:
            self._process = VllmProcess(prepared.arguments, self._weights.specs(), clear_cache=recompute_kv)
        except BaseException:
            self._folder.cleanup()
            raise

    def close(self) -> None:
        """End vLLM's processes."""
        self._process.run(self._end([one.task for one in self._writing.values() if one.task is not None]))
        self._process.close()
        self._folder.cleanup()

    @staticmethod
    async def _end(tasks: list[asyncio.Task]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- Answers -----------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Of the weights that write the next token."""
        return self._weights.version

    @property
    def is_serving(self) -> bool:
        """False before the first update, and after one that broke off half-way until a complete one."""
        return self._weights.is_complete

    @property
    def num_running(self) -> int:
        """Sequences that are being written."""
        return min(len(self._writing), self._max_concurrent)

    @property
    def num_waiting(self) -> int:
        """Submitted samples for which there is no room yet."""
        return len(self._writing) - self.num_running

    @property
    def free_capacity(self) -> int:
        """Samples that can be submitted before one has to wait."""
        return max(0, self._max_concurrent - len(self._writing))

    def generate(
        self, samples: Sequence[Sample], sampling: SamplingConfig, recording: Recording = RECORD_NOTHING
    ) -> list[Trajectory]:
        """One answer for each sample, in the order of `samples`; nothing else may run.

        Raises:
            ValueError: as `submit`, or something runs.
        """
        if self._writing:
            raise ValueError(f"{len(self._writing)} samples are being written; step until none is left")
        self.submit(samples, sampling, recording)
        answers: dict[int, Trajectory] = {}
        while self._writing:
            answers.update((answer.sample.number, answer) for answer in self.step())
        return [answers[sample.number] for sample in samples]

    def submit(
        self, samples: Sequence[Sample], sampling: SamplingConfig, recording: Recording = RECORD_NOTHING
    ) -> None:
        """Let vLLM write samples from now on.

        Args:
            samples: what to answer.
            sampling: how tokens are drawn.
            recording: what to write down beside the token and its log-probability.

        Raises:
            ValueError: a prompt is empty or too long, the settings cannot be met, there are no complete weights, a
                sample of that number is being written, or others are under other settings. Nothing is submitted then.
        """
        self._weights.check()
        in_flight = [one.sample for one in self._writing.values()]
        self._requests.check(samples, sampling, recording, in_flight)
        if in_flight and (sampling, recording) != self._settings:
            raise ValueError(
                f"{len(in_flight)} samples are written under {self._settings}, and samples under "
                f"{(sampling, recording)} were submitted; step until none is left"
            )
        self._settings = (sampling, recording)
        for sample in samples:
            key = f"sample-{sample.number}-{next(self._keys)}"
            self._writing[sample.number] = _Writing(sample, key, self.policy_version)
        self._process.run(self._start([self._writing[sample.number] for sample in samples], sampling, recording))

    async def _start(self, batch: list[_Writing], sampling: SamplingConfig, recording: Recording) -> None:
        for one in batch:
            one.task = asyncio.create_task(self._write(one, sampling, recording))
        # Until vLLM knows them all: an update that follows would take those that it does not know for ended.
        while any(one.key not in self._process.numbers_written() and not one.task.done() for one in batch):
            await asyncio.sleep(0)

    async def _write(self, one: _Writing, sampling: SamplingConfig, recording: Recording) -> None:
        from vllm.sampling_params import RequestOutputKind

        params = self._requests.parameters(
            one.sample, sampling, recording, key=one.key, output_kind=RequestOutputKind.FINAL_ONLY
        )
        prompt = {"prompt_token_ids": one.sample.prompt.token_ids.tolist()}
        try:
            async for output in self._process.llm.generate(prompt, params, one.key):
                answer = output.outputs[0]
            records = None
            if self._draws:
                records = (await self._process.llm.collective_rpc("take_draws", args=([one.key],)))[0][0]
            policy_versions, kv_versions = self._versions(one, answer)
            result = self._requests.trajectory(
                one.sample,
                sampling,
                recording,
                answer,
                records=records,
                policy_versions=policy_versions,
                kv_versions=kv_versions,
            )
        except Exception as error:  # the thread that calls `step` is told
            result = error
        self._ended.put((one, result))

    def step(self) -> list[Trajectory]:
        """Wait a moment for answers to end.

        Returns:
            Those that have ended, in no particular order.

        Raises:
            ValueError: the last weight update failed; all samples stay, and go on after a complete one.
            RuntimeError: vLLM has died, or failed at a sample.
        """
        self._weights.check()
        answers: list[Trajectory] = []
        while self._writing:
            try:
                one, result = self._ended.get(block=not answers, timeout=_STEP_SECONDS)
            except queue.Empty:
                break
            if self._writing.get(one.sample.number) is not one:
                continue  # cancelled after it had ended
            del self._writing[one.sample.number]
            if isinstance(result, ValueError):
                raise result
            if isinstance(result, BaseException):
                raise RuntimeError(f"vLLM failed at sample {one.sample.number}: {result}") from result
            answers.append(result)
        return answers

    def cancel(self, numbers: Collection[int]) -> list[Sample]:
        """Drop submitted samples without a trajectory.

        Args:
            numbers: sample numbers; those of samples that `step` has returned, or that nobody submitted, are passed
                over.

        Returns:
            The samples that were dropped, to be submitted anew or given back.
        """
        dropped = [self._writing.pop(number) for number in set(numbers) if number in self._writing]
        if dropped:
            self._process.run(self._abort(dropped))
        return [one.sample for one in dropped]

    async def _abort(self, dropped: list[_Writing]) -> None:
        await self._end([one.task for one in dropped if one.task is not None])
        if self._draws:
            await self._process.llm.collective_rpc("take_draws", args=([one.key for one in dropped],))

    # ---- Versions of tokens ------------------------------------------------------------------------------------------

    def _versions(self, one: _Writing, answer: Any) -> tuple[Tensor, Tensor | None]:
        """[N] int32 the version that wrote each token, and, where the cache was kept, the oldest behind each.

        vLLM labels each step's tokens with the version in service, and this end noted how many there were at each
        update. Where the two differ the older version counts: a token is then taken for staler than it is, never for
        fresher.
        """
        num_tokens = len(answer.token_ids)
        marked_N = torch.full((num_tokens,), one.version, dtype=torch.int32)
        for written, version in one.marks:
            marked_N[written:] = version
        versions_N = marked_N.clone()
        for span in answer.weight_versions or ():
            versions_N[span.start : span.end] = int(span.version)
        if not torch.equal(versions_N, marked_N):
            logger.warning(
                "sample %d: vLLM says that its tokens are of the versions %s, they were noted as %s; the older count",
                one.sample.number,
                versions_N.unique_consecutive().tolist(),
                marked_N.unique_consecutive().tolist(),
            )
        versions_N = torch.minimum(versions_N, marked_N)
        return versions_N, None if self._recompute_kv else torch.full_like(versions_N, one.version)

    # ---- Weights -----------------------------------------------------------------------------------------------------

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Write all weights of policy version `version` into vLLM's own storage, while answers are being written.

        Writing stops with the first tensor and goes on after the last one, with the next token under the new weights.
        A failure before the first tensor leaves the old version in service; after it nothing is written until a
        complete update.

        Raises:
            ValueError: a name is unknown, comes twice or is missing, a shape or type does not fit, or the version
                would fall.
            VerificationError: the workers have other bytes than those sent.
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
        """Of `vllm_weights.Carrier`, as all until `logprobs`: the engine is its own way to vLLM's workers."""
        self._process.begin_update()

    def send(self, pieces: Sequence[Piece]) -> None:
        self._process.send(pieces)

    def finish(self, version: int) -> None:
        self._process.finish_update(version)
        written = self._process.numbers_written()
        for one in self._writing.values():
            if one.key in written:
                one.marks.append((written[one.key], version))

    def resume(self) -> None:
        self._process.resume()

    def digests(self) -> Mapping[str, int]:
        return self._process.digests()

    def logprobs(self, token_ids: list[int]) -> Tensor:
        # The paused scheduler starts nothing: whatever is being written goes on from here. If the answer is wrong, the
        # update fails, and nothing that was written is handed out.
        self._process.resume()
        return self._process.logprobs(token_ids)
