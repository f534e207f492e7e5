from __future__ import annotations

import json
import logging

import pyarrow
import pyarrow.parquet
import pytest
import torch

from tests.unit.data.chat import END, make_chat_tokenizer
from titan_opd.config.schema import ArithmeticConfig, DataConfig
from titan_opd.data import load_prompts, load_tokenizer
from titan_opd.data.arithmetic import arithmetic_tokenizer, worked_sum

TOKENIZER = make_chat_tokenizer()
ROWS = [
    {"question": "2+2?", "answer": "It is 4.\n#### 4", "level": 1},
    {"question": "20+3?", "answer": "It is 23.\n#### 23", "level": 2},
]
GSM8K = {"prompt_field": "question", "response_field": "answer"}


def write_jsonl(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def load(tmp_path, rows, **options):
    """The training prompts of a JSONL file with `rows`; a row that is a text is written as it stands."""
    return load_prompts(DataConfig(train=write_jsonl(tmp_path / "train.jsonl", rows), **options), TOKENIZER)[0]


def test_a_jsonl_file(tmp_path):
    prompts = load(tmp_path, ROWS, **GSM8K)
    assert [prompt.id for prompt in prompts] == ["train.jsonl:1", "train.jsonl:2"]
    first = prompts[0]
    assert TOKENIZER.decode(first.token_ids) == "<s><|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert first.answer == ROWS[0]["answer"]
    assert TOKENIZER.decode(first.response_ids) == ROWS[0]["answer"] + END
    assert first.token_ids.dtype == first.response_ids.dtype == torch.int64
    assert first.metadata == {"level": 1}


def test_a_parquet_file_says_the_same(tmp_path):
    rows = [{**row, "messages": [{"role": "user", "content": row["question"]}]} for row in ROWS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    config = DataConfig(train=str(tmp_path / "train.parquet"), **{**GSM8K, "prompt_field": "messages"})
    for prompt, expected in zip(load_prompts(config, TOKENIZER)[0], load(tmp_path, ROWS, **GSM8K), strict=True):
        assert torch.equal(prompt.token_ids, expected.token_ids)
        assert torch.equal(prompt.response_ids, expected.response_ids)
        assert prompt.answer == expected.answer
        assert prompt.id == expected.id.replace("jsonl", "parquet")


def test_evaluation_is_a_file_of_its_own(tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", ROWS)
    evaluation = write_jsonl(tmp_path / "test.jsonl", ROWS[:1])
    assert [len(part) for part in load_prompts(DataConfig(train=train, prompt_field="question"), TOKENIZER)] == [2, 0]
    config = DataConfig(train=train, evaluation=evaluation, prompt_field="question")
    assert [prompt.id for prompt in load_prompts(config, TOKENIZER)[1]] == ["test.jsonl:1"]


def test_ids_answers_and_responses_may_be_there_or_not(tmp_path):
    rows = [{"prompt": "a", "id": 7, "answer": 4}, "", {"prompt": "b", "answer": None, "face": "\U0001f600"}]
    first, second = load(tmp_path, rows)
    assert (first.id, first.answer, first.response_ids) == ("7", "4", None)
    assert (second.id, second.answer, second.metadata) == ("train.jsonl:3", None, {"face": "\U0001f600"})


def test_a_stop_token_of_the_model_ends_a_response(tmp_path):
    tokenizer = make_chat_tokenizer(eos="</s>")
    config = DataConfig(train=write_jsonl(tmp_path / "train.jsonl", ROWS), **GSM8K)
    with pytest.raises(ValueError, match=r"train.jsonl:1: .*no stop token"):
        load_prompts(config, tokenizer)
    end = tokenizer.convert_tokens_to_ids(END)
    assert load_prompts(config, tokenizer, (end,))[0][0].response_ids[-1] == end


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ('{"prompt": "a"', {}, r"broken JSON \(Expecting ',' delimiter at column 15\); each line must be"),
        ("[" * 100_000, {}, r"cannot be read as JSON \(maximum recursion depth"),
        ('{"prompt": "a", "answer": ' + "9" * 5000 + "}", {}, r"cannot be read as JSON \(Exceeds the limit"),
        ({"prompt": "a", "id": "\ud800"}, {}, r"an escape .* without its other half is no character"),
        ("[1]", {}, r"a line must be an object \{...\}, not list"),
        ({"promt": "a", "x": 1}, {}, r"no column 'prompt' \(data.prompt_field\); the columns are promt, x; did you "
                                     r"mean 'promt'\?; set data.prompt_field"),
        ({"prompt": 3}, {}, r"column 'prompt' \(data.prompt_field\) must be a text or a list .* it is int"),
        ({"prompt": " \n"}, {}, r"column 'prompt' \(data.prompt_field\) is empty"),
        ({"prompt": []}, {}, r"must end with a message to answer"),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, {}, r"must end with a message to answer"),
        ({"prompt": ["a"]}, {}, r"prompt\[0\] .* must be a chat message .* it is 'a'"),
        ({"prompt": [{"role": "user"}]}, {}, r"prompt\[0\] .* with the texts 'role' and 'content'"),
        ({"prompt": "a", "answer": 0.5}, {}, r"\(data.answer_field\) must be of type str or int, it is"),
        ({"prompt": "a", "answer": True}, {}, r"must be of type str or int, it is bool"),
        ({"prompt": "a", "answer": ""}, {}, r"column 'answer' \(data.answer_field\) is an empty text"),
        ({"prompt": "a", "response": ["b"]}, {}, r"column 'response' \(data.response_field\) must be of type str, it"),
        ({"prompt": "a", "response": "b<|im_end|>c"}, {}, r"the response has the stop token"),
        ({"prompt": "a" * 90}, {"max_prompt_tokens": 100}, r"has 110 tokens with its template, more than "
                                                           r"data.max_prompt_tokens = 100; raise that, or set"),
        ({"prompt": "a", "id": "one"}, {}, r"id 'one' is also that of row 1"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_with_its_file_line_and_fix(tmp_path, row, options, message):
    good = {"prompt": "a", "id": "one"}
    with pytest.raises(ValueError, match=rf"{tmp_path}/train.jsonl:3: .*{message}"):
        load(tmp_path, [good, "", row], **options)


@pytest.mark.parametrize("option", ["answer_field", "response_field"])
def test_a_column_that_the_user_named_must_exist(tmp_path, option):
    message = rf"train.jsonl: there is no column 'awnser' \(data.{option}\); .*did you mean 'answer'"
    with pytest.raises(ValueError, match=message):
        load(tmp_path, ROWS, prompt_field="question", **{option: "awnser"})


def test_overlong_prompts_are_skipped_and_counted(tmp_path, caplog):
    rows = [{"prompt": "a"}, {"prompt": "a" * 90}, {"prompt": "b"}]
    with caplog.at_level(logging.WARNING):
        prompts = load(tmp_path, rows, overlong="skip", max_prompt_tokens=100)
    assert [prompt.id for prompt in prompts] == ["train.jsonl:1", "train.jsonl:3"]
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "skipped 1 of 3 prompts, longer than data.max_prompt_tokens = 100"
    ]
    with pytest.raises(ValueError, match=r"all 3 prompts are longer than data.max_prompt_tokens = 2"):
        load(tmp_path, rows, overlong="skip", max_prompt_tokens=2)


def test_files_that_cannot_be_read_are_named(tmp_path):
    def refused(name, message, content=None):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_prompts(DataConfig(train=str(tmp_path / name)), TOKENIZER)

    refused("none.jsonl", r"data.train = '.*none.jsonl': there is no such file")
    refused("a.json", r"the name ends in '.json', but only .jsonl and .parquet files are read; convert", b"{}")
    refused("empty.jsonl", r"the file has no rows", b"\n\n")
    refused("latin.jsonl", r"latin.jsonl:1: not UTF-8", b'{"prompt": "\xe9"}')
    refused("utf16.jsonl", r"utf16.jsonl:1: not UTF-8", '{"prompt": "a"}\n'.encode("utf-16"))
    refused("marked.jsonl", r"the file has no rows", b"\xef\xbb\xbf")
    refused("n" * 300 + ".jsonl", r"there is no such file")
    refused("broken.parquet", r"broken.parquet: cannot be read as Parquet", b"PAR1")


def test_a_byte_order_mark_is_passed_over(tmp_path):
    (tmp_path / "marked.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    prompts = load_prompts(DataConfig(train=str(tmp_path / "marked.jsonl")), TOKENIZER)[0]
    assert [prompt.question for prompt in prompts] == ["a", "b"]


NO_TEXT = pyarrow.StringArray.from_buffers(1, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff"))
PARQUET = {
    "text that is not UTF-8": pyarrow.table({"prompt": NO_TEXT}),
    "nanoseconds": pyarrow.table({"prompt": ["a"], "time": pyarrow.array([1], pyarrow.timestamp("ns"))}),
    "two columns of one name": pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["prompt"] * 2),
}


@pytest.mark.parametrize("name", PARQUET)
def test_a_parquet_file_that_python_cannot_take_is_named_in_one_line(tmp_path, name):
    pyarrow.parquet.write_table(PARQUET[name], tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=r"train.parquet: cannot be read as Parquet") as error:
        load_prompts(DataConfig(train=str(tmp_path / "train.parquet")), TOKENIZER)
    assert "\n" not in str(error.value)


def test_the_arithmetic_task_needs_its_own_tokenizer(tmp_path):
    config = DataConfig(task="arithmetic", arithmetic=ArithmeticConfig(num_train=30, num_eval=4))
    train, evaluation = load_prompts(config, load_tokenizer("arithmetic"))
    assert (len(train), len(evaluation)) == (30, 4)
    with pytest.raises(ValueError, match=r"set student.tokenizer = 'arithmetic'"):
        load_prompts(config, TOKENIZER)
    short = DataConfig(task="arithmetic", max_prompt_tokens=7)
    with pytest.raises(ValueError, match=r"max_digits = 3 makes prompts of 8 tokens, .*max_prompt_tokens = 7; raise"):
        load_prompts(short, load_tokenizer("arithmetic"))


def test_arithmetic_problems_from_a_file_are_those_of_the_task(tmp_path):
    """A plain template, the task's tokenizer and its texts: the same tokens as the built-in task makes."""
    built_in, _ = load_prompts(DataConfig(task="arithmetic"), arithmetic_tokenizer(), (1,))
    rows = [
        {
            "prompt": prompt.question,
            "response": worked_sum(*map(int, prompt.question[:-1].split("+"))),
            "answer": prompt.answer,
        }
        for prompt in built_in[:50]
    ]
    config = DataConfig(train=write_jsonl(tmp_path / "sums.jsonl", rows), template="plain")
    prompts, _ = load_prompts(config, arithmetic_tokenizer(), (1,))
    for prompt, expected in zip(prompts, built_in[:50], strict=True):
        assert torch.equal(prompt.token_ids, expected.token_ids)
        assert torch.equal(prompt.response_ids, expected.response_ids)
        assert (prompt.question, prompt.answer) == (expected.question, expected.answer)


def test_a_character_without_a_token_is_named_with_its_row(tmp_path):
    config = DataConfig(train=write_jsonl(tmp_path / "sums.jsonl", [{"prompt": "3 + 4="}]), template="plain")
    with pytest.raises(ValueError, match=r"sums\.jsonl:1: the tokenizer cannot write the text '3 \+ 4='"):
        load_prompts(config, arithmetic_tokenizer(), (1,))
