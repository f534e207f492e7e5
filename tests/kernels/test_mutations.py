"""The checks would notice: each fault planted in a copy of the CUDA kernels fails a check of tests/kernels/standalone.

Every barrier of every kernel is removed once, without a list. The other faults are in `FAULTS`, by the text that they
replace; text that is no longer there is an error, so that a fault is never planted nowhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from standalone_build import CHECKS, FIBERS, KERNELS, ROOT, compile_object, link, run

pytestmark = pytest.mark.slow

SECONDS_OF_A_CHECK = 20  # some faults make a kernel wait forever
BARRIER = re.compile(r"^ *__sync(?:threads|warp)\(\);.*\n", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """One change of one file, and the kernel whose check must notice.

    Attributes:
        kernel: the .cu file, without its ending, that is compiled with the fault; its check has the same name.
        title: what is wrong then.
        file: in csrc.
        after: text before the place, to tell it from places alike.
        old, new: the first `old` behind `after` becomes `new`.
    """

    kernel: str
    title: str
    file: str
    after: str
    old: str
    new: str

    def plant(self, csrc: Path) -> None:
        path = csrc / self.file
        text = path.read_text()
        begin = text.find(self.after)
        place = text.find(self.old, begin)
        if begin < 0 or place < 0:
            raise ValueError(
                f"{self.file} no longer has {self.old!r} after {self.after!r}: change the fault {self.title}"
            )
        path.write_text(text[:place] + self.new + text[place + len(self.old) :])


def removed_barriers(source: Path) -> list[Fault]:
    """A fault for each barrier of a .cu file."""
    text = source.read_text()
    return [
        Fault(
            source.stem,
            f"without barrier {number}",
            f"cuda/{source.name}",
            text[: barrier.start()],
            text[barrier.start() : barrier.end()],
            "",
        )
        for number, barrier in enumerate(BARRIER.finditer(text), start=1)
    ]


def faults_of(kernel: str, file: str, after: str, *changes: tuple[str, str, str]) -> list[Fault]:
    """Faults of one place: a title, old and new text each."""
    return [Fault(kernel, title, file, after, old, new) for title, old, new in changes]


FAULTS = [
    *(fault for source in sorted(KERNELS.glob("*.cu")) for fault in removed_barriers(source)),
    *faults_of(
        "gather_stats",
        "cuda/device.cuh",
        "void for_each_column(",
        ("one column past the row's end", "i < num_single", "i <= num_single"),
        ("last column left out", "i < num_single", "i < num_single - 1"),
        ("last vector left out", "i < num_vectors", "i < num_vectors - 1"),
        ("vectors at any address", "(kVector - misaligned) % kVector", "0"),
        ("head's columns taken for the tail's", "i < head ? i : tail + (i - head)", "tail + i"),
        ("vectors counted from the row's start", "visit(head + i * kVector, z)", "visit(i * kVector, z)"),
        ("factor forgotten in vectors", "to_float(elements[j]) * factor", "to_float(elements[j])"),
    ),
    *faults_of(
        "gather_stats",
        "cuda/device.cuh",
        "ExpSum warp_merge(",
        ("neighbours never meet", "offset > 0", "offset > 1"),
        ("halves of the warp never meet", "kWarpThreads / 2", "kWarpThreads / 4"),
    ),
    *(
        fault
        for kernel in ("gather_stats", "topk_logprobs")
        for fault in faults_of(
            kernel,
            "cuda/device.cuh",
            "void write_row_stats(",
            ("without the barrier before the warps' sums", "  __syncthreads();\n", ""),
            ("a warp's sum left out", "lane < kWarps ? sums[1]", "lane < kWarps - 1 ? sums[1]"),
        )
    ),
    *faults_of(
        "gather_stats",
        "cuda/gather_stats.cu",
        "",
        ("sum not moved to the new maximum", "inside.sum * __expf(inside.max - shift_inside)", "inside.sum"),
        (
            "inside and outside exchanged",
            "if (bits >> j & 1u) {\n      inside.sum",
            "if (!(bits >> j & 1u)) {\n      inside.sum",
        ),
        ("bit of another column", "1u << (column % 32)", "1u << (column % 31)"),
        ("bits shifted by too little", "word[1], column % 32", "word[1], column % 16"),
        ("no word to read ahead", "((columns + 31) / 32 + 1) * sizeof", "((columns + 31) / 32) * sizeof"),
        ("support not cleared", "support[word] = 0", "support[word] |= 0"),
        ("ids of other shards counted", "if (column >= 0 && column < num_columns)", "if (column < num_columns)"),
        ("second segment from the first's columns", "row + begin, num_columns", "row, num_columns"),
    ),
    *faults_of(
        "sparse_softmax_grad",
        "cuda/device.cuh",
        "void transform_columns(",
        ("one element past the row's end", "i < num_single", "i <= num_single"),
        ("last element left out", "i < num_single", "i < num_single - 1"),
        ("last vector left out", "i < num_vectors", "i < num_vectors - 1"),
        ("vectors at any address", "(kVector - misaligned) % kVector", "0"),
        ("vectors not written back", "vectors[i] = raw", "raw.x = 0"),
    ),
    *faults_of(
        "sparse_softmax_grad",
        "cuda/sparse_softmax_grad.cu",
        "",
        ("duplicates not added up", "== id ? g[i]", "== id && i == k ? g[i]"),
        ("padding not written", "column < task.num_columns", "column < task.shard.num_columns"),
        ("ids of other shards written", "if (column >= 0) {\n      from_float(own", "{\n      from_float(own"),
    ),
    *faults_of(
        "dense_pair",
        "cuda/dense_pair.cu",
        "",
        (
            "last columns left out",
            "visit_packs<1>(student, teacher, packed,",
            "visit_packs<1>(student, teacher, num_columns,",
        ),
        ("one column past the row's end", "column < end", "column <= end"),
        ("neighbours never meet", "offset > 0", "offset > 1"),
        ("a warp's sum left out", "lane < kWarps ? warp_sums", "lane < kWarps - 1 ? warp_sums"),
        ("several tops count several times", "fminf(sum, 1.0f)", "sum"),
        ("padding not written", "column < task.num_student_columns", "column < task.pair.num_columns"),
    ),
    *faults_of(
        "dense_pair",
        "cuda/device.cuh",
        "bool is_aligned(",
        ("packs at any address", "% sizeof(Pack<Element, N>) == 0", "% sizeof(Element) == 0"),
    ),
    *faults_of(
        "topk_logprobs",
        "cuda/topk_logprobs.cu",
        "",
        ("evicted keys in no sum", "i < capacity; i += kThreads", "i < task.k; i += kThreads"),
        ("floor at the largest key", "floor_key = keys[task.k - 1]", "floor_key = keys[0]"),
        ("sort's halves not merged", "stride = run / 2", "stride = run / 4"),
        ("no filling behind the keys", "keys[i] = kNoKey", "keys[i] = keys[0]"),
        ("ids without the shard's place", "task.shard.vocab_start + key_column", "key_column"),
    ),
    *faults_of(
        "topk_logprobs",
        "cuda/device.cuh",
        "void for_each_column_together(",
        ("last vector left out", "i < num_vectors ? kVector : 0", "i < num_vectors - 1 ? kVector : 0"),
        ("read ahead past the row's end", "i + blockDim.x < num_vectors", "i < num_vectors"),
        ("single columns twice", "i < num_single ? 1 : 0", "1"),
    ),
    *faults_of(
        "gumbel_sample",
        "cuda/gumbel_sample.cu",
        "",
        ("draws of a group alike", "(first_draw + d));\n    own", "(first_draw));\n    own"),
        ("noise of the column, not of the id", "task.shard.vocab_start + column", "column"),
        (
            "bound too low",
            "noise_bound(race_word(draw_keys[d], id + j)) >",
            "0.5f * noise_bound(race_word(draw_keys[d], id + j)) >",
        ),
        ("a warp's winner left out", "w < kWarps", "w < kWarps - 1"),
        ("a wrong row drawn from", "is_wrong |= !(z[j] < INFINITY)", "is_wrong |= false"),
        ("neighbours never meet", "offset > 0", "offset > 1"),
    ),
    *faults_of(
        "multi_copy",
        "cuda/multi_copy.cu",
        "",
        (
            "rest of a tile left out",
            "copy_packs<1, Source, Destination>(task, packed_end, end)",
            "static_cast<void>(0)",
        ),
        ("one element past the end", "i < end", "i <= end"),
        ("source's stride for both", "row * task.destination_stride", "row * task.source_stride"),
        ("blocks of the copy before", "table.first_block[t] > block", "table.first_block[t] >= block && t > 0"),
        ("second table from the first's copies", "tasks[first + t]", "tasks[t]"),
        ("packs at any address", "in_packs ? begin +", "true ? begin +"),
    ),
]


@pytest.fixture(scope="module")
def frame(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("frame")
    return [compile_object(source, folder) for source in (CHECKS / "main.cpp", FIBERS)]


@pytest.fixture(scope="module")
def link_check(tmp_path_factory, frame):
    """A function from a kernel's name and its object file to the program that checks it."""
    folder = tmp_path_factory.mktemp("checks")
    objects: dict[str, Path] = {}

    def link_one(kernel: str, compiled: Path) -> Path:
        if kernel not in objects:
            objects[kernel] = compile_object(CHECKS / f"{kernel}.cpp", folder)
        return link([*frame, objects[kernel], compiled], compiled.with_suffix(".program"))

    return link_one


def notices(program: Path) -> bool:
    """Whether the check fails, by itself, by a sanitizer or by waiting forever."""
    try:
        return run(program, seconds=SECONDS_OF_A_CHECK).returncode != 0
    except subprocess.TimeoutExpired:
        return True


@pytest.mark.parametrize("kernel", sorted({fault.kernel for fault in FAULTS}))
def test_the_kernels_themselves_pass(tmp_path, link_check, kernel):
    assert not notices(link_check(kernel, compile_object(KERNELS / f"{kernel}.cu", tmp_path)))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kernel}: {fault.title}")
def test_a_fault_is_noticed(tmp_path, link_check, fault):
    csrc = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", csrc)
    fault.plant(csrc)
    assert notices(link_check(fault.kernel, compile_object(csrc / "cuda" / f"{fault.kernel}.cu", tmp_path)))


def test_a_fault_that_finds_no_place_is_an_error(tmp_path):
    (tmp_path / "a.cu").write_text("first\nsecond\n")
    with pytest.raises(ValueError, match=r"a\.cu no longer has 'first' after 'second': change the fault misplaced"):
        Fault("a", "misplaced", "a.cu", "second", "first", "").plant(tmp_path)
    Fault("a", "placed", "a.cu", "first", "s", "S").plant(tmp_path)
    assert (tmp_path / "a.cu").read_text() == "firSt\nsecond\n"
