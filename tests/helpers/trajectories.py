"""Answers with made-up numbers in them, for tests of what scores, packs and trains answers."""

from __future__ import annotations

import torch

from titan_opd.data.records import Prompt, Sample, Trajectory


def make_trajectories(
    count: int,
    *,
    vocab_size: int,
    seed: int = 0,
    longest: int = 9,
    num_samples: int = 0,
    top_k: int = 0,
    num_kept: int = 0,
) -> list[Trajectory]:
    """Random prompts and answers of 1 to `longest` tokens each, in no order of length.

    Args:
        count: how many.
        vocab_size: every id is below it.
        seed: of everything.
        longest: most tokens of a prompt, and of an answer.
        num_samples, top_k: columns of `sampled_ids` and `topk_ids`; 0: not recorded.
        num_kept: ids that truncated sampling kept at each position, the samples among them; 0: not truncated.
    """
    generator = torch.Generator().manual_seed(seed)

    def logprobs(*shape: int) -> torch.Tensor:
        return -4 * torch.rand(shape, generator=generator) - 0.1

    answers = []
    for number in range(count):
        num_prompt, num_response = torch.randint(1, longest + 1, (2,), generator=generator).tolist()
        sampled_ids = torch.randint(vocab_size, (num_response, max(num_samples, 1)), generator=generator)
        sampled_logprobs = logprobs(*sampled_ids.shape)
        others = torch.rand(num_response, vocab_size, generator=generator)
        if num_kept:
            assert num_kept >= max(num_samples, 1)
            kept = others.scatter(1, sampled_ids, 2.0).topk(num_kept).indices
        prompt = Prompt(f"prompt-{number}", torch.randint(vocab_size, (num_prompt,), generator=generator))
        answers.append(
            Trajectory(
                sample=Sample(number, 0, 0, prompt),
                response_ids=sampled_ids[:, 0].clone(),
                policy_versions=torch.zeros(num_response, dtype=torch.int32),
                finish_reason="stop",
                behavior_logprobs=sampled_logprobs[:, 0].clone(),
                behavior_support=kept if num_kept else None,
                sampled_ids=sampled_ids if num_samples else None,
                sampled_logprobs=sampled_logprobs if num_samples else None,
                topk_ids=others.topk(top_k).indices if top_k else None,
                topk_logprobs=logprobs(num_response, top_k) if top_k else None,
            )
        )
    return answers
