"""The teacher in vLLM against the native one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.engines.writing import VOCAB_SIZE
from tests.helpers.trajectories import make_trajectories
from tests.helpers.vllm import CPU, SHAPES, make_student, needs_vllm
from titan_opd.config.objective import Objective
from titan_opd.config.schema import TeacherConfig, TeacherVllmConfig
from titan_opd.models import save_decoder
from titan_opd.teacher import NativeScorer, TeacherModel
from titan_opd.teacher.vllm import VllmScorer

pytestmark = needs_vllm
TOP_K = 9
OBJECTIVES = {
    "top k": (Objective(kind="forward_kl", support="teacher_topk"), {}),
    "top k at a temperature": (Objective(kind="forward_kl", support="teacher_topk", temperature=0.7), {}),
    "written tokens": (Objective(kind="policy_gradient", support="sampled"), {}),
    "samples": (Objective(kind="policy_gradient", support="sampled"), {"num_samples": 4, "num_kept": 6}),
    "student's top k": (Objective(kind="reverse_kl", support="student_topk", temperature=1.3), {"top_k": 6}),
}


@pytest.fixture(scope="module", params=list(SHAPES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher")
    save_decoder(make_student(request.param, seed=2), path)
    return path


def scorer_config(**options: int) -> TeacherConfig:
    vllm = TeacherVllmConfig(**({"kv_cache_mb": 64, "search_k": VOCAB_SIZE} | options))
    return TeacherConfig(engine="vllm", path="-", top_k=TOP_K, tokens_per_forward=64, vllm=vllm)


def make_scorer(folder: Path, objective: Objective, **options: int) -> VllmScorer:
    return VllmScorer(
        folder, objective, config=scorer_config(**options), vocab_size=VOCAB_SIZE, max_tokens=60, device=CPU
    )


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_scores_are_the_native_teachers(folder: Path, name: str) -> None:
    from titan_opd.models import load_decoder

    objective, recorded = OBJECTIVES[name]
    answers = make_trajectories(20, vocab_size=VOCAB_SIZE, longest=30, **recorded)  # some are read in several parts
    native = NativeScorer(
        TeacherModel(load_decoder(folder)),
        objective,
        vocab_size=VOCAB_SIZE,
        top_k=TOP_K,
        tokens_per_forward=1000,
        logits_chunk_mb=16.0,
    )
    found = make_scorer(folder, objective).score(answers)
    for answer, mine, other in zip(answers, found, native.score(answers), strict=True):
        assert mine.trajectory is answer
        mine, other = mine.scores, other.scores
        assert torch.equal(mine.ids, other.ids)
        torch.testing.assert_close(mine.logprobs, other.logprobs, atol=1e-4, rtol=0)
        torch.testing.assert_close(mine.tail_logprobs, other.tail_logprobs, atol=1e-3, rtol=0)
        for field in ("behavior_logprobs", "behavior_support"):
            expected = getattr(other, field)
            assert (getattr(mine, field) is None) == (expected is None)
            assert expected is None or torch.equal(getattr(mine, field), expected)


@pytest.mark.parametrize("kind", ["mistral", "qwen3_moe"])
def test_a_teacher_of_an_architecture_that_only_vllm_has(kind: str, tmp_path: Path) -> None:
    """In a process of its own: vLLM lays out experts' processes once in a process. Against transformers."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from tests.engines.vllm_cases import score_foreign; score_foreign({kind!r}, '{tmp_path}')",
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_teacher_over_two_devices_scores_as_one_does(tmp_path: Path) -> None:
    """In processes of its own; the vocabulary of 101 tokens in 112 rows does not divide evenly."""
    save_decoder(make_student("qwen3", seed=2), tmp_path)
    objective, recorded = OBJECTIVES["student's top k"]
    answers = make_trajectories(20, vocab_size=VOCAB_SIZE, longest=30, **recorded)
    one, two = make_scorer(tmp_path, objective), make_scorer(tmp_path, objective, tensor_parallel_size=2)
    for mine, other in zip(two.score(answers), one.score(answers), strict=True):
        assert torch.equal(mine.scores.ids, other.scores.ids)
        torch.testing.assert_close(mine.scores.logprobs, other.scores.logprobs, atol=1e-4, rtol=0)
        torch.testing.assert_close(mine.scores.tail_logprobs, other.scores.tail_logprobs, atol=1e-3, rtol=0)
    assert len(set(two._llm.collective_rpc("process_number")) | {os.getpid()}) == 3
    two._llm.llm_engine.engine_core.shutdown()


def test_given_ids_are_asked_for_where_the_model_runner_takes_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The V2 runner needs a GPU. Here vLLM accepts the request but for the runner, and its answer is made up."""
    objective, recorded = OBJECTIVES["student's top k"]
    scorer = make_scorer(folder, objective, search_k=TOP_K)
    answers = make_trajectories(5, vocab_size=VOCAB_SIZE, **recorded)
    monkeypatch.setattr(scorer, "_takes_ids", True)
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="prompt_logprob_token_ids requires the V2 model runner"):
        scorer.score(answers)

    expected = make_scorer(folder, objective).score(answers)

    def generate(texts: list, parameters: list, **_: object) -> list[SimpleNamespace]:
        outputs = []
        for text, asked, answer, scored in zip(texts, parameters, answers, expected, strict=True):
            ids, first = torch.from_numpy(asked.prompt_logprob_token_ids), asked.prompt_logprob_start + 1
            assert text["prompt_token_ids"][first:] == answer.response_ids.tolist()
            assert torch.equal(ids.long(), answer.topk_ids)
            found = scored.scores.logprobs.numpy()
            outputs.append(SimpleNamespace(prompt_logprobs=None, prompt_token_id_logprobs=found))
        return outputs

    monkeypatch.setattr(scorer, "_llm", SimpleNamespace(generate=generate))
    for mine, other in zip(scorer.score(answers), expected, strict=True):
        for field in ("ids", "logprobs", "tail_logprobs", "behavior_logprobs"):
            assert torch.equal(getattr(mine.scores, field), getattr(other.scores, field))


def test_a_token_outside_the_search_is_an_error_that_names_it(folder: Path) -> None:
    scorer = make_scorer(folder, Objective(kind="policy_gradient", support="sampled"), search_k=2)
    answers = make_trajectories(6, vocab_size=VOCAB_SIZE, num_samples=8)
    with pytest.raises(ValueError, match=r"sample \d: .* no log-probability for token \d+ at response token \d+"):
        scorer.score(answers)
    written = [replace(answer, sampled_ids=None, sampled_logprobs=None) for answer in answers]
    assert len(scorer.score(written)) == 6  # the text's own tokens are always there
    assert scorer.score([]) == []


@pytest.mark.parametrize(
    "objective",
    [Objective(kind="forward_kl", support="dense"), Objective(kind="mc_forward_kl", support="sampled")],
    ids=["dense", "teacher's draws"],
)
def test_whole_vocabularies_are_refused(folder: Path, objective: Objective) -> None:
    with pytest.raises(ValueError, match=r"teacher\.engine = 'native'"):
        make_scorer(folder, objective)
