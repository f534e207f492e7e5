"""Imports go one way, as titan_opd/README.md says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "titan_opd"


def read_ranks() -> dict[str, int]:
    """The rooms that the guide puts in order, with their places in it: a room imports from no later place."""
    (order,) = re.findall(r"Imports go one way, `(.*?)`", (PACKAGE / "README.md").read_text(), re.DOTALL)
    return {room: rank for rank, group in enumerate(order.split("<-")) for room in re.findall(r"\w+", group)}


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(file: Path) -> Iterator[str]:
    """What a file imports when it is imported or used; not for types alone, nor as a program."""
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("titan_opd."):
            yield node.module.split(".")[1]


def test_no_room_imports_a_later_one():
    ranks = read_ranks()
    assert len(ranks) > 15
    assert all((PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").is_file() for room in ranks)
    for file in PACKAGE.rglob("*.py"):
        room = room_of(file)
        for other in imported_rooms(file):
            assert other != "planning" or room in ("planning", "cli"), file
            if room in ranks and other in ranks:
                assert ranks[other] <= ranks[room], f"{file} imports titan_opd.{other}"
