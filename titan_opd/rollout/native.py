"""`NativeEngine`: the student's own decoder writes answers, with continuous batching.

One step is one forward pass: every running sequence decodes one token, and the sequences that join bring their whole
prompts. A finished sequence leaves at once, and a waiting one takes its place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from titan_opd.config.schema import RolloutConfig, SamplingConfig
from titan_opd.data.records import Sample, Trajectory
from titan_opd.models import Decoder
from titan_opd.rollout.engine import RECORD_NOTHING, Recording, check_version
from titan_opd.rollout.reading import read_answers
from titan_opd.rollout.requests import check_numbers, check_samples, check_stop_ids, check_vocabulary
from titan_opd.rollout.row_update import RowUpdate
from titan_opd.rollout.sampler import Sampler
from titan_opd.rollout.stream import PinnedStream, Stream
from titan_opd.rollout.update import InPlaceUpdate, NamedTensors
from titan_opd.weights.pieces import WeightSpec


class NativeEngine:
    """Writes answers with a decoder that lives in this process; a `StreamingEngine`.

    Args:
        decoder: the engine's own, which `load_weights` overwrites; not the one that is trained.
        config: `max_concurrent` and `fixed_shapes` are read here. The latter gives every computation that an answer
            goes through a shape and a place that do not depend on the other samples, so that the answer does not
            either, to the bit. Sample n then runs in row n mod `max_concurrent` and waits for it; each step costs as
            much as one with all rows taken and all at their greatest length; prompts are read one at a time.
        stop_ids: tokens that end an answer, beside `SamplingConfig.stop_ids`.
        vocab_size: number of the tokenizer's tokens; rows of the vocabulary at or above it are never sampled.
        max_prompt_tokens: longest prompt, in tokens.
        seed: of the sampler's noise.
        recompute_kv: after `load_weights`, compute the keys and values of all running sequences anew before their next
            token, in passes of at most `PREFILL_TOKENS` tokens: the rest of an answer is then exactly the new policy's
            continuation. Otherwise the old ones stay in use, and `Trajectory.kv_versions` tells which tokens that
            concerns.

    Raises:
        ValueError: the tokenizer has more tokens than the decoder, or a stop token that can never be sampled.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        config: RolloutConfig,
        stop_ids: Collection[int],
        vocab_size: int,
        max_prompt_tokens: int,
        seed: int,
        recompute_kv: bool = True,
    ) -> None:
        check_vocabulary(vocab_size, decoder.config)
        self.policy_version = 0
        self.takes_rows = True  # of weights
        self._decoder = decoder
        self._update = InPlaceUpdate(decoder)
        self._max_concurrent = config.max_concurrent
        self._stop_ids = frozenset(stop_ids)
        self._vocab_size = vocab_size
        self._max_prompt_tokens = max_prompt_tokens
        self._seed = seed
        self._recompute_kv = recompute_kv
        self._fixed_shapes = config.fixed_shapes
        self._stream: Stream | None = None  # what `submit` opened; None while nothing runs or waits
        self._stream_settings: tuple[SamplingConfig, Recording] | None = None
        check_stop_ids(self._stop_ids, vocab_size)

    @torch.no_grad()  # not inference_mode: autograd could not save what that makes, and the loss reads trajectories
    def generate(
        self, samples: Sequence[Sample], sampling: SamplingConfig, recording: Recording = RECORD_NOTHING
    ) -> list[Trajectory]:
        """One answer for each sample, in the order of `samples`.

        A stream of its own, from the first sample to the last: what was submitted waits meanwhile, untouched.

        Args:
            samples: what to answer; `Sample.number` keys the noise, so an answer does not depend on the others.
            sampling: how tokens are drawn; `stop_ids` are joined with the engine's own.
            recording: what to write down beside the token and its log-probability.

        Raises:
            ValueError: a prompt is empty or too long, the settings cannot be met, or the last weight update failed.
        """
        self._check_request(samples, sampling)
        if not samples:
            return []
        longest = max(len(sample.prompt.token_ids) for sample in samples)
        stream = self._open(sampling, recording, most_samples=len(samples), longest_prompt=longest)
        stream.submit(samples)
        answers: dict[int, Trajectory] = {}
        while stream.num_running or stream.num_waiting:
            answers.update((answer.sample.number, answer) for answer in stream.step(self.policy_version))
        return [answers[sample.number] for sample in samples]

    @property
    def is_serving(self) -> bool:
        """False after an update that broke off half-way, until a complete one."""
        return self._update.is_complete

    @property
    def num_running(self) -> int:
        """Sequences that `step` writes a token to; those that join with it come on top."""
        return 0 if self._stream is None else self._stream.num_running

    @property
    def num_waiting(self) -> int:
        """Submitted samples that have no row yet."""
        return 0 if self._stream is None else self._stream.num_waiting

    @property
    def free_capacity(self) -> int:
        """Samples that can be submitted before one has to wait because all rows are taken."""
        return max(0, self._max_concurrent - self.num_running - self.num_waiting)

    def submit(
        self, samples: Sequence[Sample], sampling: SamplingConfig, recording: Recording = RECORD_NOTHING
    ) -> None:
        """Let samples join the running sequences with the next steps, as rows become free.

        The cache, `max_concurrent` rows of the longest prompt and answer, is made with the first sample and freed when
        nothing runs or waits any more.

        Args:
            samples: what to answer.
            sampling: how tokens are drawn.
            recording: what to write down beside the token and its log-probability.

        Raises:
            ValueError: as `generate`; a sample of that number runs or waits; other settings than those of the samples
                that run or wait. Nothing is submitted then.
        """
        in_flight = [] if self._stream is None else list(self._stream.samples())
        self._check_request(samples, sampling, in_flight)
        if in_flight and (sampling, recording) != self._stream_settings:
            raise ValueError(
                f"{len(in_flight)} samples run or wait under {self._stream_settings}, and samples under "
                f"{(sampling, recording)} were submitted; step until none is left, or answer them with `generate`"
            )
        if not samples:
            return
        if self._stream is None:
            self._stream = self._open(
                sampling, recording, most_samples=self._max_concurrent, longest_prompt=self._max_prompt_tokens
            )
            self._stream_settings = (sampling, recording)
        self._stream.submit(samples)

    @torch.no_grad()
    def step(self) -> list[Trajectory]:
        """Write one token to every running sequence, those that join with this step among them.

        Returns:
            The answers that ended with this token, in no particular order.

        Raises:
            ValueError: the last weight update failed (all samples stay, and go on after a complete one), or logits are
                not finite. An error while computing drops all that runs or waits.
        """
        self._update.check()
        if self._stream is None:
            return []
        try:
            answers = self._stream.step(self.policy_version)
        except BaseException:
            self._stream = None  # half a step may be in the cache
            raise
        self._close_if_idle()
        return answers

    def cancel(self, numbers: Collection[int]) -> list[Sample]:
        """Drop submitted samples without a trajectory, and free their rows.

        Args:
            numbers: sample numbers; those of samples that neither run nor wait, perhaps ended already, are passed over.

        Returns:
            The samples that were dropped, to be submitted anew or given back.
        """
        if self._stream is None:
            return []
        dropped = self._stream.cancel(frozenset(numbers))
        self._close_if_idle()
        return dropped

    @torch.no_grad()
    def read(
        self, trajectories: Sequence[Trajectory], sampling: SamplingConfig, recording: Recording
    ) -> list[Trajectory]:
        """Answers that somebody else wrote, with what this policy says at each of their tokens, in the same order.

        The log-probabilities of their tokens and whatever `recording` asks for, under the settings of `sampling`; the
        sampled columns beside the token's own are draws of this policy at the same prefix.

        Args:
            trajectories: answers of at least one token; `Sample.number` keys the noise.
            sampling: how tokens are drawn.
            recording: what to write down.

        Raises:
            ValueError: the settings cannot be met, or the last weight update failed.
        """
        self._update.check()
        check_numbers([trajectory.sample for trajectory in trajectories])
        read = read_answers(
            self._decoder,
            trajectories,
            self._sampler(sampling, recording),
            rows_per_chunk=self._max_concurrent,
            one_at_a_time=self._fixed_shapes,
        )
        return [replace(trajectory, sampling=sampling) for trajectory in read]

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Copy all weights of policy version `version` into the decoder's own storage, cast to its dtype.

        Between two steps this may be called while sequences run: their later tokens are written by the new version.

        A mapping or another collection is checked before anything is copied; of an iterator each tensor is checked
        when it comes. An error before the first tensor is copied leaves the old version in service. After it the
        engine refuses to write until a complete update; what runs or waits stays and goes on then.

        Raises:
            ValueError: a name is unknown, comes twice or is missing, a shape or type does not fit, or the version
                would fall.
        """
        check_version(self.policy_version, version)
        self._update.load(named_tensors, version)
        self.policy_version = version
        if self._stream is not None:
            self._stream.weights_changed(recompute_kv=self._recompute_kv)

    def weight_specs(self) -> dict[str, WeightSpec]:
        """What a complete update consists of."""
        return self._update.specs

    @contextmanager
    def update_weights(self, version: int) -> Iterator[RowUpdate]:
        """Put in the weights of policy version `version` piece by piece; see `titan_opd.weights.target.WeightTarget`.

        Raises:
            ValueError: the version would fall, or the pieces do not make up all weights.
        """
        check_version(self.policy_version, version)
        with self._update.open(version, vocab_size=self._vocab_size) as update:
            yield update
        self.policy_version = version
        if self._stream is not None:
            self._stream.weights_changed(recompute_kv=self._recompute_kv)

    def _open(
        self, sampling: SamplingConfig, recording: Recording, *, most_samples: int, longest_prompt: int
    ) -> Stream:
        """An empty stream with room for what it is to hold, and with fixed shapes for the most that it may have to."""
        stops_V = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._decoder.lm_head_weight.device)
        stops_V[list(self._stop_ids | set(sampling.stop_ids))] = True
        if self._fixed_shapes:
            most_samples, longest_prompt = self._max_concurrent, self._max_prompt_tokens
        context = self._decoder.config.max_position_embeddings
        make = PinnedStream if self._fixed_shapes else Stream
        return make(
            self._decoder,
            self._sampler(sampling, recording),
            sampling,
            stops_V,
            num_rows=min(self._max_concurrent, most_samples),
            num_positions=min(longest_prompt + sampling.max_new_tokens, context),
        )

    def _sampler(self, sampling: SamplingConfig, recording: Recording) -> Sampler:
        return Sampler(
            sampling, recording, vocab_size=self._vocab_size, seed=self._seed, fixed_shapes=self._fixed_shapes
        )

    def _close_if_idle(self) -> None:
        if not self.num_running and not self.num_waiting:
            self._stream = None

    def _check_request(
        self, samples: Sequence[Sample], sampling: SamplingConfig, in_flight: Iterable[Sample] = ()
    ) -> None:
        self._update.check()
        check_stop_ids(self._stop_ids | set(sampling.stop_ids), self._vocab_size)
        check_samples(
            samples,
            in_flight,
            vocab_size=self._vocab_size,
            max_prompt_tokens=self._max_prompt_tokens,
            max_new_tokens=sampling.max_new_tokens,
            context=self._decoder.config.max_position_embeddings,
        )
