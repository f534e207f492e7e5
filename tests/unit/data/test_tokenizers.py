from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from titan_opd.data import check_tokenizer, compare_tokenizers, load_tokenizer, num_tokens, stop_ids
from titan_opd.data.arithmetic import EOS


def make_tokenizer(*tokens, **options):
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def test_the_built_in_tokenizer_survives_its_folder(tmp_path):
    built_in = load_tokenizer("arithmetic")
    built_in.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    compare_tokenizers(built_in, loaded)
    text = "347+85=7+5=2c1;#432"
    ids = loaded.encode(text)
    assert ids == built_in.encode(text)
    assert len(ids) == len(text)
    assert loaded.decode(ids) == text
    assert loaded.decode([*ids, loaded.eos_token_id], skip_special_tokens=True) == text
    assert loaded.eos_token == built_in.eos_token == EOS


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer folder 'Qwen/Qwen3-4B'; .*nothing is downloaded"):
        load_tokenizer("Qwen/Qwen3-4B")
    with pytest.raises(ValueError, match=r"has no tokenizer: none of tokenizer.json"):
        load_tokenizer(str(tmp_path))


def test_broken_files_are_named(tmp_path):
    load_tokenizer("arithmetic").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=f"cannot read the tokenizer in '{tmp_path}'"):
        load_tokenizer(str(tmp_path))


def test_what_transformers_says_in_lines_is_one(tmp_path):
    load_tokenizer("arithmetic").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "initializer_range": null}')
    with pytest.raises(ValueError, match=r"cannot read the tokenizer in .*initializer_range") as error:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)


def test_more_tokens_than_rows_is_refused():
    tokenizer = make_tokenizer("a", "b", "c")
    check_tokenizer(tokenizer, 3, "student.path = 'x'")
    check_tokenizer(tokenizer, 64, "student.path = 'x'")
    with pytest.raises(ValueError, match=r"student.path = 'x': the tokenizer has 3 tokens and .* only 2 rows; use the"):
        check_tokenizer(tokenizer, 2, "student.path = 'x'")


def test_ids_with_holes_count_up_to_the_highest():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 7})))
    assert num_tokens(tokenizer) == 8


def test_a_tokenizer_of_other_tokens_in_the_same_range_is_refused():
    student, teacher = make_tokenizer("a", "b", "c", "d", "e"), make_tokenizer("a", "c", "b", "e", "d")
    compare_tokenizers(student, make_tokenizer("a", "b", "c", "d", "e"))
    with pytest.raises(ValueError, match="4 ids differ") as error:
        compare_tokenizers(student, teacher)
    assert "id 1 is 'b' for the student and 'c' for the teacher; id 2 is 'c' for the student" in str(error.value)


def test_tokens_of_one_side_only_are_named():
    student, teacher = make_tokenizer("a", "b"), make_tokenizer("a", "b", "think")
    with pytest.raises(ValueError, match="id 2 is no token for the student and 'think' for the teacher"):
        compare_tokenizers(student, teacher)
    with pytest.raises(ValueError, match="id 2 is 'think' for the student and no token for the teacher"):
        compare_tokenizers(teacher, student)


def test_stop_ids_are_the_union_of_all_sources():
    tokenizer = make_tokenizer("a", "b", "c", "d", "</s>", eos_token="</s>")
    assert stop_ids(tokenizer) == (4,)
    assert stop_ids(tokenizer, (3, 4), (1,)) == (1, 3, 4)
    assert stop_ids(make_tokenizer("a", "b"), (1,)) == (1,)


def test_stop_ids_must_exist():
    tokenizer = make_tokenizer("a", "b")
    with pytest.raises(ValueError, match="neither the tokenizer nor the model's config names an eos token"):
        stop_ids(tokenizer)
    with pytest.raises(ValueError, match=r"eos_token_id of the model's config: stop id 151645 is none of .* 2 tokens"):
        stop_ids(tokenizer, (151645,))
    with pytest.raises(ValueError, match=r"sampling.stop_ids: stop id 2 is none"):
        stop_ids(tokenizer, (1,), (2,))
