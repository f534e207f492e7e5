"""From a question, and an expert's response, to token ids: the chat template or a plain one.

A prompt has at most one BOS. Under the chat template it is the one that the template writes, if it writes one; the
tokenizer's own is left out, as in transformers' `apply_chat_template`. Under the plain template it is the tokenizer's
own, unless the template's text begins with it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from titan_opd.config.schema import DataConfig
from titan_opd.data.tokenizers import adds_bos, encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Question = str | list[dict[str, Any]]  # a text, or chat messages


class Template(Protocol):
    """Turns one row of the data into tokens; what is wrong with the row is a ValueError."""

    def prompt_ids(self, question: Question) -> list[int]:
        """The prompt, up to where the answer begins."""

    def response_ids(self, question: Question, response: str) -> list[int]:
        """The response as the model should write it after `prompt_ids(question)`, with one stop token at its end."""


def make_template(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int] = ()
) -> ChatTemplate | PlainTemplate:
    """The template of a configuration; `stop_ids` end an answer, beside the tokenizer's eos token."""
    if tokenizer.eos_token_id is not None:
        stop_ids = {tokenizer.eos_token_id, *stop_ids}
    if config.template == "chat":
        return ChatTemplate(tokenizer, config.system_prompt, stop_ids)
    return PlainTemplate(tokenizer, config.plain_template, stop_ids)


class PlainTemplate:
    """A text with `{prompt}` where the question goes.

    A response is tokenised by itself, because that is how it is written: token by token after a finished prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, stop_ids: Collection[int]) -> None:
        if "{prompt}" not in text:
            raise ValueError(
                f"data.plain_template = {text!r} has no place for the question; write {{prompt}} where it goes"
            )
        self._tokenizer = tokenizer
        self._text = text
        self._stop_ids = stop_ids
        self._bos = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []

    def prompt_ids(self, question: Question) -> list[int]:
        if not isinstance(question, str):
            raise ValueError("the prompt is a list of chat messages; data.template = 'plain' takes a text; use 'chat'")
        ids = encode_text(self._tokenizer, self._text.replace("{prompt}", question))
        return ids if ids[:1] == self._bos else self._bos + ids

    def response_ids(self, question: Question, response: str) -> list[int]:
        return _end_with_stop(self._tokenizer, encode_text(self._tokenizer, response), self._stop_ids)


class ChatTemplate:
    """The tokenizer's own chat template; the system message, if any, goes before the question."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system_prompt: str, stop_ids: Collection[int]) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                "data.template = 'chat', but the tokenizer has no chat template; set data.template = 'plain', or add "
                "the model's chat template to the tokenizer's folder"
            )
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._stop_ids = stop_ids

    def prompt_ids(self, question: Question) -> list[int]:
        return encode_text(self._tokenizer, self._render(self._messages(question), add_generation_prompt=True))

    def response_ids(self, question: Question, response: str) -> list[int]:
        messages = self._messages(question)
        prompt_text = self._render(messages, add_generation_prompt=True)
        answered = [*messages, {"role": "assistant", "content": response}]
        text = self._render(answered, add_generation_prompt=False)
        prompt_ids, ids = encode_text(self._tokenizer, prompt_text), encode_text(self._tokenizer, text)
        if not text.startswith(prompt_text) or ids[: len(prompt_ids)] != prompt_ids:
            raise ValueError(
                "the chat template does not write the answered conversation as a continuation of the prompt "
                f"({_differing(prompt_text, text)}); remove white space at the response's beginning, or write the "
                "template out with data.template = 'plain'"
            )
        turn = text[len(prompt_text) :].rstrip()
        suffix = ids[len(prompt_ids) :]
        if not self._stop_ids.isdisjoint(suffix) or turn.endswith(response.rstrip()):
            return _end_with_stop(self._tokenizer, suffix, self._stop_ids)
        raise ValueError(
            f"the chat template ends the assistant's turn with {turn[-20:]!r}, in which there is no stop token "
            f"({_names(self._tokenizer, self._stop_ids)}); use the tokenizer of the chat model, whose eos token ends a "
            "turn, or add the token's id to rollout.sampling.stop_ids"
        )

    def _messages(self, question: Question) -> list[dict[str, Any]]:
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        if not self._system_prompt:
            return messages
        if messages[0]["role"] == "system":
            raise ValueError("the prompt has a system message of its own; remove it, or set data.system_prompt = ''")
        return [{"role": "system", "content": self._system_prompt}, *messages]

    def _render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError  # here: only chat templates need it

        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the chat template refuses messages of the roles {roles}: {error}") from error


def _end_with_stop(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stop_ids: Collection[int]) -> list[int]:
    """`ids` with exactly one stop token, at the end: what a template writes after it (white space) is cut off."""
    first = next((i for i, token in enumerate(ids) if token in stop_ids), None)
    if first is None:
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos token to end the response with; set one in its files")
        return [*ids, tokenizer.eos_token_id]
    rest = tokenizer.decode(ids[first + 1 :])
    if rest.strip():
        raise ValueError(
            f"the response has the stop token {_names(tokenizer, ids[first : first + 1])} before {rest[:20]!r}; an "
            "answer ends there: remove the token or what comes after it"
        )
    return list(ids[: first + 1])


def _names(tokenizer: PreTrainedTokenizerBase, ids: Collection[int]) -> str:
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(i)!r} = {i}" for i in sorted(ids)) or "none is known"


def _differing(prompt_text: str, text: str) -> str:
    """Where two texts part, or that they part in their tokens only."""
    for i, (expected, found) in enumerate(zip(prompt_text, text, strict=False)):
        if expected != found:
            return f"{prompt_text[i:][:20]!r} against {text[i:][:20]!r}"
    return "the prompt's last token is another one when the response follows"
