"""Rows of JSONL and Parquet files; what is wrong with a file is said with its name and row."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_opd.errors import one_line

_READABLE = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Row:
    """One row of a file.

    Attributes:
        number: of the line in a JSONL file, of the row in a Parquet file, from 1.
        columns: name to value; in a JSONL file, what this row has.
    """

    number: int
    columns: dict[str, Any]


def read_rows(path: Path, key: str) -> list[Row]:
    """All rows of a file, at least one.

    Args:
        path: a `.jsonl` file (one object a line, UTF-8, blank lines are passed over) or a `.parquet` file.
        key: the option that named the file, for errors.

    Raises:
        ValueError: a file that is missing, empty, of another kind or broken, with the row where it breaks.
    """
    if path.suffix not in _READABLE:
        raise ValueError(
            f"{key} = {str(path)!r}: the name ends in {path.suffix!r}, but only {' and '.join(_READABLE)} files are "
            "read; convert the file"
        )
    if not os.path.isfile(path):  # False for a name that no file can have, too
        raise ValueError(f"{key} = {str(path)!r}: there is no such file (looked from {Path.cwd()}); correct the path")
    rows = list(_read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path))
    if not rows:
        raise ValueError(f"{key} = {str(path)!r}: the file has no rows; name a file with at least one prompt")
    return rows


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            try:
                columns = json.loads(line.decode().strip())
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}:{number}: broken JSON ({error.msg} at column {error.colno}); each line must be one "
                    "whole object"
                ) from error
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{number}: not UTF-8 ({error.reason}); save the file as UTF-8") from error
            except (RecursionError, ValueError) as error:  # nested too deeply, a number of thousands of digits
                raise ValueError(
                    f"{path}:{number}: cannot be read as JSON ({error}); mend or remove the row"
                ) from error
            if not isinstance(columns, dict):
                raise ValueError(f"{path}:{number}: a line must be an object {{...}}, not {type(columns).__name__}")
            if b"\\ud" in line.lower() and not _is_text(columns):
                raise ValueError(
                    f"{path}:{number}: an escape \\ud8.. to \\udf.. without its other half is no character; mend "
                    "or remove the row"
                )
            yield Row(number, columns)


def _is_text(columns: dict[str, Any]) -> bool:
    """Whether all of a row can be written as UTF-8."""
    try:
        json.dumps(columns, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow  # here, because few runs need it
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: what Python has no value for
        raise ValueError(f"{path}: cannot be read as Parquet ({one_line(error)}); write the file anew") from error
    for number, columns in enumerate(rows, start=1):
        yield Row(number, columns)
