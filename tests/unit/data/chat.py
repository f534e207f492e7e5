"""A small tokenizer with a chat template, BOS and EOS, for tests: one token a character, and two newlines are one."""

from __future__ import annotations

import string

from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, TURN, END = "<s>", "</s>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_chat_tokenizer(*, chat_template=CHATML, eos=END, adds=f"{BOS} $A"):
    """`adds` is what the tokenizer itself puts around a text; '$A' is the text."""
    tokens = [BOS, EOS, TURN, END, *string.printable, "\n\n"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [("\n", "\n")], fuse_unk=False))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(tokens[:4])
    special = [(token, i) for i, token in enumerate(tokens[:4])]
    tokenizer.post_processor = processors.TemplateProcessing(single=adds, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=eos,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
