"""Nested names and values, checked against nested dataclasses.

    build(RunConfig, {"seed": 1, "optimiser": {"learning_rate": 0.1}})
    override(values, RunConfig, "optimiser.learning_rate", "0.2")

The dataclasses' annotations are the rules: scalars, `X | None`, `Literal`, tuples of one type, free
mappings, and further dataclasses, whose fields get dotted names.
"""

import ast
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from convjax.training.errors import ConfigError

Config = TypeVar("Config")


def build(kind: type[Config], values: Mapping[str, Any], *, prefix: str = "") -> Config:
    """Make the dataclass `kind` of nested values, checking each name and type.

    Args:
      kind: a dataclass; what it raises as a ValueError becomes a ConfigError.
      values: nested mappings; fields with a default may be left out.
      prefix: what the fields' names start with in errors.

    Raises:
      ConfigError: an unknown or missing field, or a value that is not allowed.
    """
    kinds = get_type_hints(kind)
    for name in values:
        if name not in kinds:
            raise ConfigError(_unknown(kind, prefix, name))
    for each in dataclasses.fields(typing.cast(Any, kind)):
        required = each.default is dataclasses.MISSING is each.default_factory
        if required and each.name not in values:
            raise ConfigError(f"{prefix}{each.name} must be given")
    checked = {name: _typed(value, kinds[name], prefix + name) for name, value in values.items()}
    try:
        return kind(**checked)
    except ValueError as error:
        raise ConfigError(f"{prefix}{error}") from error


def override(values: dict[str, Any], kind: type, name: str, text: str) -> None:
    """Put the value that `text` spells at the dotted `name` of the nested `values`, in place.

    Raises:
      ConfigError: `kind` has no such field.
    """
    *groups, last = name.split(".")
    inner: Any = kind
    for group in groups:
        inner = get_type_hints(inner).get(group) if dataclasses.is_dataclass(inner) else None
        values = values.setdefault(group, {})
        if inner is None or not isinstance(values, dict):
            raise ConfigError(_unknown(kind, "", name))
    if dataclasses.is_dataclass(inner):
        inner = get_type_hints(inner).get(last)
    elif get_origin(inner) is Mapping:
        inner = Any
    else:
        inner = None
    if inner is None:
        raise ConfigError(_unknown(kind, "", name))
    values[last] = _parsed(text, inner)


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each leaf of nested mappings."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def nearest(name: str, known: list[str]) -> str:
    """Return the known dotted name nearest to `name`: by last part, initials (lr) or spelling."""
    last = name.rpartition(".")[2]

    def nearness(candidate: str) -> tuple[bool, bool, float]:
        leaf = candidate.rpartition(".")[2]
        initials = "".join(word[:1] for word in leaf.split("_"))
        spelling = difflib.SequenceMatcher(None, name, candidate).ratio()
        return leaf == last, initials == last != leaf[0], spelling

    return max(known, key=nearness)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the dotted names of the leaves that two nested mappings do not share."""
    ones, others = dict(leaves(one)), dict(leaves(other))
    return [name for name in ones | others if ones.get(name, ...) != others.get(name, ...)]


def _typed(value: Any, kind: Any, name: str) -> Any:
    """Return `value` as the annotation `kind` wants it, where that loses nothing."""
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return build(typing.cast(type, kind), value, prefix=f"{name}.")
    if origin in (types.UnionType, typing.Union):  # X | None
        return None if value is None else _typed(value, arguments[0], name)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list | tuple):
        if arguments[-1] is Ellipsis or len(arguments) == len(value):
            return tuple(_typed(each, arguments[0], name) for each in value)
    elif origin is Mapping and isinstance(value, Mapping):
        return {key: _frozen(each, f"{name}.{key}") for key, each in value.items()}
    elif kind is float:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    elif type(value) is kind:
        return value
    raise ConfigError(f"{name}={value!r} must be {_described(kind)}")


def _described(kind: Any) -> str:
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(arguments)
    if get_origin(kind) is tuple:
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        return f"a tuple of {count}{arguments[0].__name__}s"
    words = {int: "an integer", float: "a finite number", str: "a string", bool: "True or False"}
    return words.get(kind, "a group of fields")


def _frozen(value: Any, name: str) -> Any:
    """Return a plain value with tuples for lists: a module's fields are hashed."""
    if isinstance(value, list | tuple):
        return tuple(_frozen(each, name) for each in value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ConfigError(f"{name}={value!r} must be a number, a string, a bool, None or a tuple")


def _parsed(text: str, kind: Any) -> Any:
    """Read `text` as a value of `kind`; what cannot be read stays text, for `build` to refuse."""
    if get_origin(kind) in (types.UnionType, typing.Union):
        return None if text.lower() == "none" else _parsed(text, get_args(kind)[0])
    if kind is str or get_origin(kind) is Literal:
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return (value,) if get_origin(kind) is tuple and type(value) in (int, float) else value


def _unknown(kind: type, prefix: str, name: str) -> str:
    known = [prefix + each for each in _field_names(kind)]
    return f"unknown field {prefix}{name}; the nearest is {nearest(prefix + name, known)}"


def _field_names(kind: Any) -> Iterator[str]:
    for name, inner in get_type_hints(kind).items():
        yield name
        if dataclasses.is_dataclass(inner):
            yield from (f"{name}.{each}" for each in _field_names(inner))
