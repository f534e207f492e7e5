"""Every option of the TOML schema as Markdown: `python -m titan_opd.config.document > train_configs/OPTIONS.md`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from titan_opd.config.options import field_types
from titan_opd.config.schema import Config


def document() -> str:
    """A table of options for each section."""
    head = "# Options\n\nMade from the dataclasses in `titan_opd/config` by `python -m titan_opd.config.document`.\n"
    return head + "".join(_document_section(Config, "", {}))


def _document_section(section: type, prefix: str, defaults: dict[str, Any]) -> Iterator[str]:
    """A section and those nested in it; `defaults` are of the section as its parent makes it, where it makes one."""
    kinds = field_types(section)
    fields = dataclasses.fields(section)
    if prefix:
        yield f"\n## [{prefix}]\n\n{(section.__doc__ or '').strip().splitlines()[0]}\n\n"
        yield "| option | default | what it does |\n|---|---|---|\n"
        for field in fields:
            if not dataclasses.is_dataclass(kinds[field.name]):
                # One that follows from other options (None) is described in words.
                default = None if field.default is None else defaults.get(field.name, field.default)
                yield f"| `{field.name}` | {_default(default)} | {_describe(field)} |\n"
    for field in fields:
        if dataclasses.is_dataclass(kinds[field.name]):
            made = dataclasses.MISSING if field.default_factory is dataclasses.MISSING else field.default_factory()
            own = defaults.get(field.name, made)
            name = f"{prefix}.{field.name}" if prefix else field.name
            yield from _document_section(kinds[field.name], name, {} if own is dataclasses.MISSING else vars(own))


def _default(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "required"
    default = list(default) if isinstance(default, tuple) else default
    return "" if default is None else f"`{str(default).lower() if isinstance(default, bool) else repr(default)}`"


def _describe(field: dataclasses.Field[Any]) -> str:
    bounds = field.metadata
    notes = [", ".join(f"`{choice!r}`" for choice in bounds["choices"])] if bounds["choices"] else []
    for name, sign in (("minimum", "≥"), ("above", ">"), ("maximum", "≤"), ("below", "<")):
        if bounds[name] is not None:
            notes.append(f"{sign} {bounds[name]}")
    text = bounds["doc"].replace("|", "\\|")
    return f"{text} ({'; '.join(notes)})" if notes else text


if __name__ == "__main__":
    print(document(), end="")
