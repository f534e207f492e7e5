"""What can be wrong with a request for answers: the same for every engine, refused before anything is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from titan_opd.config.schema import SamplingConfig
from titan_opd.data.records import Prompt, Sample
from titan_opd.models import DecoderConfig
from titan_opd.rollout.engine import Recording


def check_vocabulary(vocab_size: int, model: DecoderConfig) -> None:
    """Raise a ValueError when the tokenizer has more tokens than the model's embedding has rows."""
    if vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {vocab_size} tokens and the model's embedding {model.vocab_size} rows: "
            "tokens without a row cannot be read or written; use the model's own tokenizer, or a model whose "
            f"embedding was enlarged to at least {vocab_size} rows"
        )


def check_stop_ids(stop_ids: Collection[int], vocab_size: int) -> None:
    """Raise a ValueError when a stop token can never be sampled."""
    unreachable = sorted(stop_id for stop_id in stop_ids if not 0 <= stop_id < vocab_size)
    if unreachable:
        raise ValueError(
            f"stop ids {unreachable} are not among the tokenizer's {vocab_size} tokens and could never end "
            "an answer; remove them from sampling.stop_ids, or use the model's own tokenizer"
        )


def check_recording(recording: Recording, sampling: SamplingConfig) -> None:
    """Raise a ValueError when top-K candidates are asked for at temperature 0, where all but one have probability 0."""
    if recording.top_k and sampling.temperature == 0:
        raise ValueError(
            f"the student's top {recording.top_k} cannot be recorded at temperature 0: the distribution is a "
            "single token; sample at a temperature above 0"
        )


def check_samples(
    samples: Sequence[Sample],
    in_flight: Iterable[Sample] = (),
    *,
    vocab_size: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    context: int,
) -> None:
    """Raise a ValueError when a prompt is empty, too long or of another vocabulary, or samples share a number.

    Args:
        samples: what is asked.
        in_flight: samples that run or wait already.
        vocab_size: number of the tokenizer's tokens.
        max_prompt_tokens: longest prompt.
        max_new_tokens: longest answer.
        context: most tokens of prompt and answer together.
    """
    for sample in samples:
        _check_prompt(sample.prompt, vocab_size, max_prompt_tokens, max_new_tokens, context)
    check_numbers([*in_flight, *samples])


def _check_prompt(prompt: Prompt, vocab_size: int, max_prompt_tokens: int, max_new_tokens: int, context: int) -> None:
    length = len(prompt.token_ids)
    if not length:
        raise ValueError(f"prompt {prompt.id!r} has no tokens; the first token of an answer needs one before it")
    if length > max_prompt_tokens:
        raise ValueError(
            f"prompt {prompt.id!r} has {length} tokens, data.max_prompt_tokens = {max_prompt_tokens}; raise "
            "the limit, or skip such prompts with data.overlong = 'skip'"
        )
    if length + max_new_tokens > context:
        raise ValueError(
            f"prompt {prompt.id!r} has {length} tokens and sampling.max_new_tokens = {max_new_tokens}: together "
            f"more than the model's context of {context} (max_position_embeddings); lower max_new_tokens or "
            "data.max_prompt_tokens"
        )
    lowest, highest = int(prompt.token_ids.min()), int(prompt.token_ids.max())
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(
            f"prompt {prompt.id!r} holds token {wrong}, outside the tokenizer's {vocab_size} tokens; was it "
            "tokenized with another tokenizer?"
        )


def check_numbers(samples: Sequence[Sample]) -> None:
    """Raise a ValueError when samples share a number."""
    counts = Counter(sample.number for sample in samples)
    twice = sorted(number for number, count in counts.items() if count > 1)
    if twice:
        raise ValueError(f"samples share the numbers {twice[:5]}: they would draw the same noise; number them uniquely")
