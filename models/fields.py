"""JSON objects and other tables of named values, read key by key: an error names file, key and value."""

import json
import reprlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
KINDS = {str: "texts", int: "whole numbers", float: "numbers", dict: "objects", object: "entries"}


@dataclass(frozen=True)
class Fields:
    """A table of named values, where null counts as absent.

    Each method gives the value of a key if it is of that kind, `default` if it is absent, and raises
    ValueError otherwise; without a default the key must be there. `where` stands before the key in
    errors: the file, or the table within it.
    """

    raw: dict[str, Any]
    where: str = ""

    def has(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def integer(self, key: str, minimum: int = 1, default: int | None = None) -> int:
        if not self.has(key) and default is not None:
            return default
        value = self.need(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.wrong(key, f"a whole number of at least {minimum}")
        return value

    def number(
        self, key: str, above: float = 0.0, most: float = sys.float_info.max, default: float | None = None
    ) -> float:
        if not self.has(key) and default is not None:
            return default
        value = self.need(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not above < value <= most:
            limit = "" if most == sys.float_info.max else f" and at most {most}"
            raise self.wrong(key, f"a number above {above}{limit}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        if not self.has(key) and default is not None:
            return default
        if not isinstance(self.need(key), bool):
            raise self.wrong(key, "true or false")
        return self.raw[key]

    def text(self, key: str, default: str | None = None) -> str:
        if not self.has(key) and default is not None:
            return default
        if not isinstance(self.need(key), str):
            raise self.wrong(key, "a text")
        return self.raw[key]

    def ids(self, key: str) -> list[int]:
        """No, one or several token ids."""
        if isinstance(self.raw.get(key), list):
            return self.listed(key, int)
        return [self.integer(key, 0)] if self.has(key) else []

    def listed(self, key: str, kind: type[T], default: list[T] | None = None) -> list[T]:
        """A list whose entries all are of that type."""
        if not self.has(key) and default is not None:
            return default
        value = self.need(key)
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            raise self.wrong(key, f"a list of {KINDS[kind]}")
        return value

    def table(self, key: str) -> "Fields":
        """The object under a key, empty if it is absent."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(value or {}, f"{self.where}{key}.")

    def tables(self, key: str, default: list[dict] | None = None) -> list["Fields"]:
        """The objects of a list."""
        entries = self.listed(key, dict, default)
        return [Fields(entry, f"{self.where}{key}[{i}].") for i, entry in enumerate(entries)]

    def need(self, key: str) -> Any:
        if not self.has(key):
            raise ValueError(f"{self.where}{key} is missing")
        return self.raw[key]

    def wrong(self, key: str, needed: str) -> ValueError:
        return ValueError(f"{self.where}{key} is {reprlib.repr(self.raw[key])}; needed is {needed}")


def parse_json(data: bytes, name: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(document, dict):
        raise ValueError(f"{name} holds {reprlib.repr(document)}, not a JSON object; fetch it again")
    return document


def read_fields(path: Path) -> Fields:
    """A JSON file; no fields if it is not there."""
    raw = parse_json(path.read_bytes(), str(path)) if path.is_file() else {}
    return Fields(raw, f"{path}: ")
