"""The decoder on a real model."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.helpers.smollm2 import smollm2_folder
from titan_opd.models import PackedAttention, load_decoder


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_has_the_logits_and_the_greedy_answer_of_transformers():
    folder = smollm2_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    decoder = load_decoder(folder)

    def logits_of(input_ids):
        length = len(input_ids)
        attention = PackedAttention(torch.tensor([0, length], dtype=torch.int32), length)
        return decoder(input_ids, torch.arange(length), attention) @ decoder.lm_head_weight.T

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    torch.testing.assert_close(logits_of(prompt[0]), reference(prompt).logits[0], atol=1e-3, rtol=1e-4)

    answer = reference.generate(prompt, max_new_tokens=20, do_sample=False)[0]
    input_ids = prompt[0]
    while len(input_ids) < len(answer):
        input_ids = torch.cat((input_ids, logits_of(input_ids)[-1].argmax()[None]))
    assert torch.equal(input_ids, answer)
    assert "Paris" in tokenizer.decode(answer[prompt.shape[1] :])
