from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.chat import BOS, CHATML, END, EOS, make_chat_tokenizer
from titan_opd.config.schema import DataConfig
from titan_opd.data.templates import make_template

TOKENIZER = make_chat_tokenizer()
WORDS = st.text("ab +=\n", min_size=1, max_size=12)


def make(tokenizer=TOKENIZER, stop_ids=(), **options):
    return make_template(DataConfig(**options), tokenizer, stop_ids)


def decoded(ids, tokenizer=TOKENIZER):
    return tokenizer.decode(ids)


def test_a_chat_template_that_writes_bos_and_a_tokenizer_that_adds_one_give_exactly_one():
    assert TOKENIZER.encode("2+2")[0] == TOKENIZER.bos_token_id  # the tokenizer adds one
    ids = make().prompt_ids("2+2")
    assert decoded(ids) == f"{BOS}<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(TOKENIZER.bos_token_id) == 1


def test_the_chat_template_alone_decides_about_bos():
    tokenizer = make_chat_tokenizer(chat_template=CHATML.replace("{{ bos_token }}", ""))
    assert tokenizer.bos_token_id not in make(tokenizer).prompt_ids("2+2")


@pytest.mark.parametrize("text", ["Q: {prompt}\n", BOS + "Q: {prompt}\n"])
def test_a_plain_template_has_the_tokenizers_bos_once(text):
    assert decoded(make(template="plain", plain_template=text).prompt_ids("2+2")) == f"{BOS}Q: 2+2\n"


def test_a_tokenizer_that_adds_eos_does_not_end_a_prompt():
    tokenizer = make_chat_tokenizer(adds=f"$A {END}")
    assert decoded(make(tokenizer, template="plain").prompt_ids("2+2")) == "2+2"


def test_system_prompt_and_messages():
    template = make(system_prompt="Add.")
    assert decoded(template.prompt_ids("2+2")).startswith(
        f"{BOS}<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n"
    )
    messages = [{"role": "user", "content": "2+2"}]
    assert template.prompt_ids(messages) == template.prompt_ids("2+2")
    with pytest.raises(ValueError, match="system message of its own"):
        template.prompt_ids([{"role": "system", "content": "Sum."}, *messages])
    with pytest.raises(ValueError, match="takes a text"):
        make(template="plain").prompt_ids(messages)


@settings(max_examples=60, deadline=None)
@given(WORDS, WORDS.filter(lambda text: not text.startswith("\n")))
def test_a_chat_response_continues_the_prompt_as_the_template_writes_it(question, response):
    template = make()
    prompt_ids, response_ids = template.prompt_ids(question), template.response_ids(question, response)
    assert decoded(response_ids) == response + END
    conversation = [{"role": "user", "content": question}, {"role": "assistant", "content": response}]
    whole = TOKENIZER.apply_chat_template(conversation, return_dict=False)
    assert prompt_ids + response_ids == whole[:-1]  # all but the newline after the turn


@settings(max_examples=30, deadline=None)
@given(WORDS, WORDS)
def test_a_plain_response_ends_with_one_stop_token(question, response):
    template = make(template="plain")
    expected = [*TOKENIZER.encode(response, add_special_tokens=False), TOKENIZER.eos_token_id]
    assert template.response_ids(question, response) == expected
    assert template.response_ids(question, response + END) == expected


@pytest.mark.parametrize("template", ["chat", "plain"])
def test_a_stop_token_inside_the_response_is_refused(template):
    with pytest.raises(ValueError, match=r"stop token '<\|im_end\|>' = 3 before '5"):
        make(template=template).response_ids("2+2", f"4{END}5")


def test_a_response_that_merges_with_the_prompt_is_refused():
    with pytest.raises(ValueError, match="last token is another one when the response follows"):
        make().response_ids("2+2", "\n4")


def test_a_template_that_rewrites_the_prompt_is_refused():
    rewriting = "{{ messages | length }}:{{ messages[-1].content }}"
    with pytest.raises(ValueError, match=r"'1:2\+2' against '2:4'"):
        make(make_chat_tokenizer(chat_template=rewriting)).response_ids("2+2", "4")


def test_a_turn_that_ends_with_no_known_stop_token_is_refused_unless_it_is_named():
    tokenizer = make_chat_tokenizer(eos=EOS)
    with pytest.raises(ValueError, match=r"'4<\|im_end\|>', in which there is no stop token \('</s>' = 1\)"):
        make(tokenizer).response_ids("2+2", "4")
    named = make(tokenizer, stop_ids=(tokenizer.convert_tokens_to_ids(END),))
    assert decoded(named.response_ids("2+2", "4"), tokenizer) == "4" + END


def test_a_template_that_writes_no_end_gets_the_eos_token():
    tokenizer = make_chat_tokenizer(chat_template=CHATML.replace("<|im_end|>", ""))
    assert decoded(make(tokenizer).response_ids("2+2", "4"), tokenizer).strip() == f"4\n{END}"


def test_a_chat_template_that_refuses_says_why():
    tokenizer = make_chat_tokenizer(chat_template="{{ raise_exception('no system role') }}")
    with pytest.raises(ValueError, match="refuses messages of the roles system, user: no system role"):
        make(tokenizer, system_prompt="Add.").prompt_ids("2+2")


def test_templates_that_cannot_work_are_refused_at_once():
    with pytest.raises(ValueError, match=r"no chat template; set data.template = 'plain'"):
        make(make_chat_tokenizer(chat_template=None))
    with pytest.raises(ValueError, match=r"data.plain_template = 'Q: \{question\}' has no place"):
        make(template="plain", plain_template="Q: {question}")
