"""`NativeEngine`: the student's own decoder writes answers, with continuous batching.

One step is one forward pass: every running sequence decodes one token, and the sequences that join bring their whole
prompts. A finished sequence leaves at once, and a waiting one takes its place.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_opd.config.schema import RolloutConfig, SamplingConfig
from titan_opd.data.records import Sample, Trajectory
from titan_opd.models import Decoder
from titan_opd.rollout.engine import RECORD_NOTHING, Recording, check_version
from titan_opd.rollout.kv_cache import KVCache, StepAttention
from titan_opd.rollout.reading import read_answers
from titan_opd.rollout.running import RunningBatch
from titan_opd.rollout.sampler import Sampler

PREFILL_TOKENS = 8192  # most prompt tokens that join in one step (a longer prompt joins alone): bounds activations


class NativeEngine:
    """Writes answers with a decoder that lives in this process.

    Args:
        decoder: the engine's own, which `load_weights` overwrites; not the one that is trained.
        config: `max_concurrent` is read here.
        stop_ids: tokens that end an answer, beside `SamplingConfig.stop_ids`.
        vocab_size: number of the tokenizer's tokens; rows of the vocabulary at or above it are never sampled.
        max_prompt_tokens: longest prompt, in tokens.
        seed: of the sampler's noise.

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
    ) -> None:
        if vocab_size > decoder.config.vocab_size:
            raise ValueError(
                f"the tokenizer has {vocab_size} tokens and the model's embedding {decoder.config.vocab_size} rows: "
                "tokens without a row cannot be read or written; use the model's own tokenizer, or a model whose "
                f"embedding was enlarged to at least {vocab_size} rows"
            )
        self.policy_version = 0
        self._decoder = decoder
        self._max_concurrent = config.max_concurrent
        self._stop_ids = frozenset(stop_ids)
        self._vocab_size = vocab_size
        self._max_prompt_tokens = max_prompt_tokens
        self._seed = seed
        self._failed_update: str | None = None  # why the weights are not those of any version
        self._check_stop_ids(self._stop_ids)

    @torch.no_grad()  # not inference_mode: autograd could not save what that makes, and the loss reads trajectories
    def generate(
        self, samples: Sequence[Sample], sampling: SamplingConfig, recording: Recording = RECORD_NOTHING
    ) -> list[Trajectory]:
        """One answer for each sample, in the order of `samples`.

        Args:
            samples: what to answer; `Sample.number` keys the noise, so an answer does not depend on the others.
            sampling: how tokens are drawn; `stop_ids` are joined with the engine's own.
            recording: what to write down beside the token and its log-probability.

        Raises:
            ValueError: a prompt is empty or too long, the settings cannot be met, or the last weight update failed.
        """
        self._check_weights()
        stop_ids = self._stop_ids | set(sampling.stop_ids)
        self._check_stop_ids(stop_ids)
        for sample in samples:
            self._check_prompt(sample, sampling.max_new_tokens)
        _check_numbers(samples)
        if not samples:
            return []

        weight = self._decoder.lm_head_weight
        stops_V = torch.zeros(self._vocab_size, dtype=torch.bool, device=weight.device)
        stops_V[list(stop_ids)] = True
        num_rows = min(self._max_concurrent, len(samples))
        longest = max(len(sample.prompt.token_ids) for sample in samples)
        # Made anew for each call: between calls the trainer can have the memory, and no garbage outlives an error.
        cache = KVCache(
            self._decoder.config,
            num_rows,
            longest + sampling.max_new_tokens,
            dtype=weight.dtype,
            device=weight.device,
        )
        sampler = Sampler(sampling, recording, vocab_size=self._vocab_size, seed=self._seed)
        batch = RunningBatch(num_rows, sampling, stops_V, self.policy_version)

        waiting = deque(samples)
        answers: dict[int, Trajectory] = {}
        while waiting or len(batch):
            joining = _next_group(waiting, batch.num_free)
            logits_RV = F.linear(self._step(batch, joining, cache), weight)
            draws = sampler.draw(logits_RV, batch.numbers_R, batch.num_written_R)
            for row in reversed(batch.append(draws)):  # from the end, so that the last row is never a finished one
                last = len(batch) - 1
                if row != last:
                    cache.move_row(last, row, int(batch.last_positions_R[last]))
                answer = batch.pop(row)
                answers[answer.sample.number] = answer
        return [answers[sample.number] for sample in samples]

    def _step(self, batch: RunningBatch, joining: list[Sample], cache: KVCache) -> Tensor:
        """Let `joining` join and run one forward pass; hidden states [R, H] that predict each row's next token."""
        prompts = [sample.prompt.token_ids for sample in joining]
        prompt_lengths = [len(prompt) for prompt in prompts]
        num_decoding = len(batch)
        attention = StepAttention(cache, batch.last_positions_R, prompt_lengths)
        input_ids_T = batch.last_ids_R
        if joining:
            input_ids_T = torch.cat([input_ids_T, torch.cat(prompts).to(input_ids_T.device)])
            batch.join(joining)
        hidden_TH = self._decoder(input_ids_T, attention.positions_T, attention)
        if not joining:
            return hidden_TH
        ends = torch.tensor(prompt_lengths).cumsum(0) - 1 + num_decoding
        return torch.cat([hidden_TH[:num_decoding], hidden_TH[ends.to(hidden_TH.device)]])

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
        self._check_weights()
        _check_numbers([trajectory.sample for trajectory in trajectories])
        sampler = Sampler(sampling, recording, vocab_size=self._vocab_size, seed=self._seed)
        return [
            replace(trajectory, sampling=sampling)
            for trajectory in read_answers(self._decoder, trajectories, sampler, rows_per_chunk=self._max_concurrent)
        ]

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy all weights of policy version `version` into the decoder's own storage, cast to its dtype.

        An error before the first tensor is copied leaves the old version in service. After it the engine refuses to
        write until a complete update.

        Raises:
            ValueError: a name is unknown, comes twice or is missing, a shape or type does not fit, or the version
                would fall.
        """
        check_version(self.policy_version, version)
        parameters = dict(self._decoder.named_parameters())
        missing = set(parameters)
        try:
            for name, tensor in named_tensors:
                _check_tensor(name, tensor, parameters, missing)
                self._failed_update = f"to version {version}, stopped at {name!r}"
                parameters[name].copy_(tensor)
                missing.remove(name)
            if missing:
                raise ValueError(
                    f"the weights of version {version} lack {len(missing)} of {len(parameters)} parameters: "
                    f"{_listed(missing)}; an update must bring every parameter once"
                )
        except BaseException as error:
            if self._failed_update is not None:
                self._failed_update = f"to version {version}: {error}"
            raise
        self._failed_update = None
        self.policy_version = version

    def _check_weights(self) -> None:
        if self._failed_update is not None:
            raise ValueError(
                f"the engine holds an incomplete weight update ({self._failed_update}); it writes again after a "
                "complete load_weights"
            )

    def _check_stop_ids(self, stop_ids: Collection[int]) -> None:
        unreachable = sorted(stop_id for stop_id in stop_ids if not 0 <= stop_id < self._vocab_size)
        if unreachable:
            raise ValueError(
                f"stop ids {unreachable} are not among the tokenizer's {self._vocab_size} tokens and could never end "
                "an answer; remove them from sampling.stop_ids, or use the model's own tokenizer"
            )

    def _check_prompt(self, sample: Sample, max_new_tokens: int) -> None:
        prompt = sample.prompt
        length, context = len(prompt.token_ids), self._decoder.config.max_position_embeddings
        if not length:
            raise ValueError(f"prompt {prompt.id!r} has no tokens; the first token of an answer needs one before it")
        if length > self._max_prompt_tokens:
            raise ValueError(
                f"prompt {prompt.id!r} has {length} tokens, data.max_prompt_tokens = {self._max_prompt_tokens}; raise "
                "the limit, or skip such prompts with data.overlong = 'skip'"
            )
        if length + max_new_tokens > context:
            raise ValueError(
                f"prompt {prompt.id!r} has {length} tokens and sampling.max_new_tokens = {max_new_tokens}: together "
                f"more than the model's context of {context} (max_position_embeddings); lower max_new_tokens or "
                "data.max_prompt_tokens"
            )
        lowest, highest = int(prompt.token_ids.min()), int(prompt.token_ids.max())
        if lowest < 0 or highest >= self._vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(
                f"prompt {prompt.id!r} holds token {wrong}, outside the tokenizer's {self._vocab_size} tokens; was it "
                "tokenized with another tokenizer?"
            )


def _check_numbers(samples: Sequence[Sample]) -> None:
    counts = Counter(sample.number for sample in samples)
    twice = sorted(number for number, count in counts.items() if count > 1)
    if twice:
        raise ValueError(f"samples share the numbers {twice[:5]}: they would draw the same noise; number them uniquely")


def _next_group(waiting: deque[Sample], num_free: int) -> list[Sample]:
    """Take the samples that join next: as many as there are free rows and `PREFILL_TOKENS` allow, one at least."""
    group: list[Sample] = []
    num_tokens = 0
    while waiting and len(group) < num_free:
        num_tokens += len(waiting[0].prompt.token_ids)
        if group and num_tokens > PREFILL_TOKENS:
            break
        group.append(waiting.popleft())
    return group


def _check_tensor(name: str, tensor: Tensor, parameters: dict[str, Tensor], missing: Collection[str]) -> None:
    if name not in parameters:
        raise ValueError(f"weights hold {name!r}, which the engine's model has no parameter for")
    if name not in missing:
        raise ValueError(f"weights hold {name!r} twice; an update must bring every parameter once")
    expected = parameters[name]
    if tensor.shape != expected.shape:
        raise ValueError(
            f"the shape of {name!r} is {list(tensor.shape)} in the weights and {list(expected.shape)} in the engine"
        )
    if not tensor.is_floating_point():
        raise ValueError(f"{name!r} is of type {tensor.dtype} in the weights; the engine casts floating types only")


def _listed(names: Collection[str], most: int = 5) -> str:
    shown = ", ".join(sorted(names)[:most])
    return shown if len(names) <= most else f"{shown}, ..."
