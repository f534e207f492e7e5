"""What prompts must be for a run to reach its end: found before it begins, not when the first of them comes up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from titan_opd.config import Config
from titan_opd.data import Prompt
from titan_opd.evaluation import require_reference
from titan_opd.rollout import require_response


def check_prompts(
    config: Config,
    train: Sequence[Prompt],
    evaluation: Sequence[Prompt],
    *,
    contexts: Mapping[str, int],
    world_size: int,
) -> None:
    """Check the prompts of a run against its settings.

    Args:
        config: the settings.
        train: training prompts.
        evaluation: those evaluation prompts that are used.
        contexts: most tokens of a sequence, by the option that names the model.
        world_size: number of processes.

    Raises:
        ValueError: a prompt has no response to train on or no answer to grade against, a sequence could be longer than
            what has to hold it, or there are fewer evaluation prompts than processes.
    """
    for prompt in train if config.rollout.engine == "answers" else ():
        require_response(prompt)
    for prompt in evaluation:
        require_reference(prompt)
    capacities = {"training.tokens_per_microbatch": config.training.tokens_per_microbatch}
    if config.teacher.engine == "native":
        capacities["teacher.tokens_per_forward"] = config.teacher.tokens_per_forward
    if config.rollout.engine == "answers":
        _check_experts(train, contexts, capacities)
    else:
        _check_sampled(train, config.rollout.sampling.max_new_tokens, "rollout.sampling", contexts, capacities)
    if not evaluation:
        return
    # Where no native teacher is beside the trainer, evaluation answers are graded, and never packed.
    is_packed = config.teacher.engine == "native" and config.teacher.placement == "colocated"
    held = capacities if is_packed else {}
    _check_sampled(evaluation, config.evaluation.sampling.max_new_tokens, "evaluation.sampling", contexts, held)
    if len(evaluation) < world_size:
        raise ValueError(
            f"{len(evaluation)} evaluation prompts leave some of the {world_size} processes without one; raise "
            "evaluation.num_prompts or give a file with more of them"
        )


def _check_sampled(
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    section: str,
    contexts: Mapping[str, int],
    capacities: Mapping[str, int],
) -> None:
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    _check_length(
        len(longest.token_ids) + max_new_tokens,
        f"prompt {longest.id!r} of {len(longest.token_ids)} tokens and {section}.max_new_tokens = {max_new_tokens}",
        f"lower {section}.max_new_tokens or data.max_prompt_tokens",
        contexts,
        capacities,
    )


def _check_experts(prompts: Sequence[Prompt], contexts: Mapping[str, int], capacities: Mapping[str, int]) -> None:
    def total(prompt: Prompt) -> int:
        return len(prompt.token_ids) + len(require_response(prompt))

    longest = max(prompts, key=total)
    subject = f"prompt {longest.id!r} and its response of {len(longest.response_ids)} tokens"
    _check_length(total(longest), subject, "leave such rows out of data.train", contexts, capacities)


def _check_length(
    total: int, subject: str, remedy: str, contexts: Mapping[str, int], capacities: Mapping[str, int]
) -> None:
    for name, context in contexts.items():
        if total > context:
            raise ValueError(
                f"{subject} make {total} tokens, more than the context of {name}, {context} (max_position_embeddings "
                f"of its config.json); {remedy}"
            )
    for name, capacity in capacities.items():
        if total - 1 > capacity:  # the last token of an answer is no input
            raise ValueError(f"{subject} make {total - 1} input tokens, more than {name} = {capacity}; raise that")
