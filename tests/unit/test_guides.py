"""What the guides name is there: links, files, options; and their tables of modules name every module."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_opd.config.options import field_types
from titan_opd.config.schema import Config

ROOT = Path(__file__).parents[2]
GUIDES = [
    guide
    for folder in ("titan_opd", "csrc", "train_configs")
    for guide in sorted((ROOT / folder).rglob("*.md"))
    if guide.name != "OPTIONS.md"
]
GUIDES.append(ROOT / "README.md")


def options(section: type, prefix: str = "") -> Iterator[str]:
    """The dotted names of a section's options and tables."""
    for name, kind in field_types(section).items():
        yield prefix + name
        if dataclasses.is_dataclass(kind):
            yield from options(kind, f"{prefix}{name}.")


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: str(guide.relative_to(ROOT)))
def test_what_a_guide_names_is_there(guide):
    text = guide.read_text()
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert "://" in link or (guide.parent / link).exists(), link
    for path in re.findall(r"`((?:titan_opd|tests|scripts|csrc|train_configs)/[\w./-]+\.\w+)`", text):
        assert (ROOT / path).is_file(), path
    known = set(options(Config))
    sections = "|".join(name for name in known if "." not in name)
    for option in re.findall(rf"`((?:{sections})(?:\.[a-z0-9_]+)+)(?: = [^`]*)?`", text):
        assert option in known or option.endswith((".py", ".toml", ".md", ".json", ".jsonl")), option


@pytest.mark.parametrize(
    "guide",
    [guide for guide in GUIDES if "| module | holds |" in guide.read_text()],
    ids=lambda guide: guide.parent.name,
)
def test_a_table_of_modules_names_all(guide):
    text = guide.read_text()
    missing = [file.name for file in guide.parent.glob("*.py") if f"`{file.name}`" not in text]
    assert [name for name in missing if name != "__init__.py"] == []
