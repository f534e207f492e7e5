"""From a TOML file and command-line overrides to a checked `Config`, and back to TOML."""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from titan_opd.config.checks import check_config
from titan_opd.config.options import convert, field_types
from titan_opd.config.schema import Config
from titan_opd.config.spelling import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a configuration.

    Args:
        path: a TOML file.
        overrides: `["--section.key", "value", ...]` or `["--section.key=value", ...]`; they win over the file.

    Raises:
        ValueError: a missing file, broken TOML, an unknown key, a wrong type or value, or settings that contradict each
            other; the message names the file, the key, what is allowed and the nearest spelling.
    """
    path = Path(path)
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise ValueError(f"no configuration file {str(path)!r}; see train_configs/ for examples") from None
    except IsADirectoryError:
        raise ValueError(f"{str(path)!r} is a folder; name the TOML file in it") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); name a TOML file") from None
    except (ValueError, RecursionError) as error:  # broken TOML, another encoding, a number of thousands of digits
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    try:
        for key, text in parse_overrides(overrides):
            _override(tree, key, text)
        config = build_section(Config, tree, prefix="")
        check_config(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return config


def build_section(section: type, tree: dict[str, Any], prefix: str, default: Any = None) -> Any:
    """A section's dataclass from its TOML table.

    Args:
        section: the dataclass.
        tree: the parsed table.
        prefix: the table's dotted name, for messages.
        default: the section as it is when the TOML does not mention it; keys that `tree` leaves out come from there.
    """
    expected = field_types(section)
    place = f"[{prefix}]" if prefix else "the configuration"
    for key in tree:
        if key not in expected:
            known = ", ".join(expected)
            raise ValueError(f"unknown key {key!r} in {place}{nearest(key, expected)}; known keys: {known}")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        key = f"{prefix}.{field.name}" if prefix else field.name
        has_factory = field.default_factory is not dataclasses.MISSING
        if field.name in tree:
            field_default = field.default_factory() if has_factory else None
            values[field.name] = _value(expected[field.name], tree[field.name], key, field_default)
        elif default is None and not has_factory and field.default is dataclasses.MISSING:
            raise ValueError(f"{key} is missing: {field.metadata['doc']}")
    try:
        return section(**values) if default is None else dataclasses.replace(default, **values)
    except ValueError as error:
        # A section knows its own name but not where it is nested ("sampling.top_p" may be rollout's or evaluation's).
        own_name = prefix.rpartition(".")[2]
        message = str(error)
        nested = message.startswith(f"{own_name}.") and prefix != own_name
        raise ValueError(prefix.removesuffix(own_name) + message if nested else message) from None


def _value(expected: Any, value: Any, key: str, default: Any) -> Any:
    if dataclasses.is_dataclass(expected):
        if not isinstance(value, dict):
            raise ValueError(f"{key} = {value!r} must be a table, [{key}]")
        return build_section(expected, value, key, default)
    return convert(value, expected, key)


def parse_overrides(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """`--section.key value` and `--section.key=value` as pairs of dotted key and text."""
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("--") or "." not in argument:
            raise ValueError(f"override {argument!r} must have the form --section.key value")
        key, separator, text = argument[2:].partition("=")
        if not separator:
            if not remaining:
                raise ValueError(f"override --{key} has no value; write --{key} VALUE")
            text = remaining.pop(0)
        yield key, text


def _override(tree: dict[str, Any], key: str, text: str) -> None:
    """Put an override into the parsed TOML. A string option takes the text as it is; others take a TOML value."""
    *tables, name = key.split(".")
    section: Any = Config
    for depth, table in enumerate(tables):
        section = _nested_section(section, table, ".".join(tables[:depth]), key)
        tree = tree.setdefault(table, {})
        if not isinstance(tree, dict):
            raise ValueError(f"--{key}: {table!r} is not a table in the file")
    expected = field_types(section)
    if name not in expected:
        raise ValueError(f"--{key}: unknown key {name!r}{nearest(name, expected)}; known keys: {', '.join(expected)}")
    is_list = typing.get_origin(expected[name]) is tuple
    if not is_list and str in (expected[name], *typing.get_args(expected[name])):
        tree[name] = text
        return
    try:
        (tree[name],) = tomllib.loads(f"value = {text}").values()  # more than one: a text of several lines
    except ValueError:
        raise ValueError(f"--{key} {text!r} is not a TOML value (examples: 3, 1e-4, true, [1, 2])") from None


def _nested_section(section: type, table: str, place: str, key: str) -> type:
    tables = {name: kind for name, kind in field_types(section).items() if dataclasses.is_dataclass(kind)}
    if table not in tables:
        where = f" in [{place}]" if place else ""
        raise ValueError(f"--{key}: no section {table!r}{where}{nearest(table, tables)}; sections: {', '.join(tables)}")
    return tables[table]


def changed_options(old: Any, new: Any, prefix: str = "") -> list[str]:
    """The dotted names of the options in which two configurations (or two sections) differ."""
    names = []
    for field in dataclasses.fields(old):
        before, after, name = getattr(old, field.name), getattr(new, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(before):
            names += changed_options(before, after, f"{name}.")
        elif before != after:
            names.append(name)
    return names


def dump_toml(config: Config) -> str:
    """The resolved configuration as TOML, every option written out; `load_config` reads it back to an equal value."""
    return "\n".join(_dump_section(config, "")).strip() + "\n"


def _dump_section(section: Any, prefix: str) -> Iterator[str]:
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    nested = {name: value for name, value in values.items() if dataclasses.is_dataclass(value)}
    if prefix:
        yield f"\n[{prefix}]"
    for name, value in values.items():
        if name not in nested and value is not None:
            yield f"{name} = {_dump_value(value)}"
    for name, value in nested.items():
        yield from _dump_section(value, f"{prefix}.{name}" if prefix else name)


def _dump_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_dump_value(item) for item in value) + "]"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for the one control character that JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)
