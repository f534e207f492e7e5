"""Reading a config.json key by key, with errors that name the file, the key and the value."""

from __future__ import annotations

from typing import Any


class Keys:
    """The keys of a config.json, read with errors that name the file, the key and the value."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def error(self, key: str, reason: str) -> ValueError:
        return ValueError(f"{self.source}: {key} = {self.values.get(key)!r} {reason}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; without a default the key is required. null counts as missing."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, "must be a positive integer")
        return value

    def count(self, key: str, default: int) -> int:
        """An integer that may be 0; null counts as missing."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(key, "must be an integer, 0 or more")
        return value

    def texts(self, key: str) -> list[str] | None:
        """A list of texts, or None."""
        value = self.values.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(text, str) for text in value)):
            raise self.error(key, "must be a list of texts, or null")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; without a default the key is required. null counts as missing."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(key, "must be a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """The token ids of a key that holds one, a list of them, or null."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.error(key, "must be a token id, a list of token ids, or null")
        return tuple(ids)

    def token_id(self, key: str) -> int | None:
        """The first token id of a key, or None."""
        return next(iter(self.token_ids(key)), None)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise ValueError(f"{self.source}: the key {key!r} is missing")
        return default
