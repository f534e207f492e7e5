"""The building blocks of the TOML schema: documented, bounded options of plain dataclasses.

A section of the configuration is a frozen dataclass whose fields are made by `option`. The field's type, bounds and
documentation live in one place; `check_section` verifies a section's values, whoever built it.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any

from titan_opd.config.spelling import nearest

_INT64 = range(-(2**63), 2**63)  # TOML's integers, and torch's
MAX_SECONDS = 1e8  # three years; the clocks of Python and torch count no further than some powers of ten beyond


def option(
    default: Any = dataclasses.MISSING,
    doc: str = "",
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of a configuration section.

    Args:
        default: value when the TOML does not name the key; without one the key is required.
        doc: what the option does, with its unit.
        choices: the allowed values of a string.
        minimum, maximum: inclusive bounds of a number (or of each number of a tuple).
        above, below: exclusive bounds.
    """
    metadata = {
        "doc": doc,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "below": below,
    }
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    if callable(default):  # a nested section, made anew for each configuration
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def field_types(section: type) -> dict[str, Any]:
    """The resolved type of each field of a section."""
    hints = typing.get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def convert(value: Any, expected: Any, key: str) -> Any:
    """`value` as the type `expected`, or a ValueError that names `key`. Only int -> float and list -> tuple convert."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):  # T | None
        if value is None:
            return None
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        return convert(value, inner, key)
    if origin is tuple and isinstance(value, (list, tuple)):
        if arguments[-1] is Ellipsis:
            return tuple(convert(item, arguments[0], f"{key}[{i}]") for i, item in enumerate(value))
        if len(value) != len(arguments):
            raise ValueError(f"{key} = {list(value)!r} must have {len(arguments)} values, it has {len(value)}")
        return tuple(
            convert(item, argument, f"{key}[{i}]")
            for i, (item, argument) in enumerate(zip(value, arguments, strict=True))
        )
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    plain = origin or expected
    if isinstance(value, plain) and not (plain in (int, float) and isinstance(value, bool)):
        return value
    name = "list" if plain is tuple else getattr(expected, "__name__", str(expected))
    raise ValueError(f"{key} = {value!r} must be of type {name}, it is {type(value).__name__}")


def check_section(section: Any, prefix: str) -> None:
    """Raise a ValueError for the first field of `section` whose type or value is not allowed."""
    expected = field_types(type(section))
    for field in dataclasses.fields(section):
        value, key = getattr(section, field.name), f"{prefix}.{field.name}" if prefix else field.name
        if dataclasses.is_dataclass(value):
            continue  # a nested section has checked itself
        convert(value, expected[field.name], key)
        _check_bounds(value, field.metadata, key)


def _check_bounds(value: Any, bounds: Any, key: str) -> None:
    if value is None or not bounds:
        return
    if isinstance(value, tuple):
        for i, item in enumerate(value):
            _check_bounds(item, bounds, f"{key}[{i}]")
        return
    if bounds["choices"] and value not in bounds["choices"]:
        allowed = ", ".join(repr(choice) for choice in bounds["choices"])
        raise ValueError(f"{key} = {value!r} is not one of {allowed}{nearest(value, bounds['choices'])}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} = {value!r} must be a finite number")
    if isinstance(value, int) and value not in _INT64:
        raise ValueError(f"{key} = {value!r} must fit into 64 bits")
    if bounds["minimum"] is not None and not value >= bounds["minimum"]:
        raise ValueError(f"{key} = {value!r} must be at least {bounds['minimum']}")
    if bounds["maximum"] is not None and not value <= bounds["maximum"]:
        raise ValueError(f"{key} = {value!r} must be at most {bounds['maximum']}")
    if bounds["above"] is not None and not value > bounds["above"]:
        raise ValueError(f"{key} = {value!r} must be above {bounds['above']}")
    if bounds["below"] is not None and not value < bounds["below"]:
        raise ValueError(f"{key} = {value!r} must be below {bounds['below']}")
