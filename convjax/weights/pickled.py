"""torch's pickles, read as data: an interpreter that can build tensors and nothing else.

A pickle is a program for a stack machine, and Python's own runs whatever that program names. Here
`pickletools.genops` lists the instructions, and a few dozen lines carry out those of a checkpoint:
constants, tuples, lists, dictionaries, and the handful of constructors in `_CONSTRUCTORS`. Every
other name in a file ends the reading with an error; nothing is imported or called for it.
"""

import io
import pickletools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


class UnreadableError(ValueError):
    """A pickle that is damaged, or holds what is no checkpoint's."""


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Name(str):
    """A global of Python's that a pickle names, such as "torch.FloatStorage"."""


def interpret(file: io.BytesIO, persistent: Callable[[Any], Any]) -> Any:
    """What the next pickle in a file says; the file is left behind its last byte.

    Args:
      file: in memory, where a length that lies cannot ask for more than there is.
      persistent: gives the object for a persistent identity, in torch a storage.

    Raises:
      UnreadableError: the pickle is damaged, or has an instruction or a name that is not known.
    """
    machine = _Machine(persistent)
    try:
        for opcode, argument, _ in pickletools.genops(file):
            machine.step(opcode.name, argument)
        return machine.stack.pop()
    except UnreadableError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        place = file.tell()
        if place == file.getbuffer().nbytes:
            raise UnreadableError("it ends within a pickle") from error
        raise UnreadableError(f"the pickle is damaged before byte {place}") from error


class _Machine:
    """The stack and the memory of one pickle."""

    def __init__(self, persistent: Callable[[Any], Any]) -> None:
        self.stack: list[Any] = []
        self.memory: dict[int, Any] = {}
        self.persistent = persistent

    def step(self, name: str, argument: Any) -> None:
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            self.stack.append(argument)
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            self.stack[-_TUPLES[name] :] = [tuple(self.stack[-_TUPLES[name] :])]
        elif name in ("PROTO", "FRAME", "STOP"):
            pass
        elif name == "MARK":
            self.stack.append(_MARK)
        elif name == "TUPLE":
            self.stack.append(tuple(self.since_mark()))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memory[argument] = self.stack[-1]
        elif name == "MEMOIZE":
            self.memory[len(self.memory)] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            self.stack.append(self.memory[argument])
        else:
            self.compose(name, argument)

    def compose(self, name: str, argument: Any) -> None:
        """Instructions that fill a container, or name or build an object."""
        if name == "APPEND":
            item = self.stack.pop()
            self.stack[-1].append(item)
        elif name == "APPENDS":
            items = self.since_mark()
            self.stack[-1].extend(items)
        elif name == "SETITEM":
            key, value = self.stack[-2:]
            del self.stack[-2:]
            _fill(self.stack[-1], [key, value])
        elif name == "SETITEMS":
            items = self.since_mark()
            _fill(self.stack[-1], items)
        elif name == "GLOBAL":
            self.stack.append(_known(argument.replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            module, attribute = self.stack[-2:]
            self.stack[-2:] = [_known(f"{module}.{attribute}")]
        elif name in ("REDUCE", "NEWOBJ"):
            constructor, arguments = self.stack[-2:]
            self.stack[-2:] = [_constructed(constructor, arguments)]
        elif name == "BUILD":
            self.stack.pop()
            if not isinstance(self.stack[-1], dict):  # a dict's are torch's `_metadata`
                raise UnreadableError(f"a {type(self.stack[-1]).__name__} cannot have attributes")
        elif name == "BINPERSID":
            self.stack.append(self.persistent(self.stack.pop()))
        else:
            raise UnreadableError(f"the pickle has the instruction {name}, which no checkpoint has")

    def since_mark(self) -> list[Any]:
        """Take what was put on the stack since the last mark, and the mark."""
        start = len(self.stack) - 1
        while self.stack[start] is not _MARK:
            start -= 1
            if start < 0:
                raise IndexError("no mark")
        items = self.stack[start + 1 :]
        del self.stack[start:]
        return items


def _fill(dictionary: Any, items: list[Any]) -> None:
    """Add keys and values that take turns."""
    if not isinstance(dictionary, dict):
        raise UnreadableError(f"a {type(dictionary).__name__} cannot have keys")
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Of a tuple in a tuple in a tuple … the hash alone would overflow Python's stack.
        if not isinstance(key, str | int | float | None):
            raise UnreadableError(f"a {type(key).__name__} is no key of a checkpoint's")
        dictionary[key] = value


def _ordered(pairs: Any = ()) -> dict[Any, Any]:
    """A dictionary, empty or of [key, value] pairs as Python 2 wrote them, or of another."""
    ordered: dict[Any, Any] = {}
    for key, value in pairs.items() if isinstance(pairs, dict) else pairs:
        _fill(ordered, [key, value])
    return ordered


def _tensor(storage: np.ndarray, offset: int, size: tuple, strides: tuple, *_: Any) -> np.ndarray:
    """A view of a storage, as torch's offset, size and strides describe it, in elements."""
    if not isinstance(storage, np.ndarray) or len(size) != len(strides):
        raise UnreadableError("a tensor is built of what is no storage, or has no whole strides")
    if offset < 0 or min((*size, *strides), default=0) < 0:
        raise UnreadableError(f"a tensor has offset {offset}, size {size} and strides {strides}")
    if 0 in size:
        return np.empty(size, storage.dtype)
    end = offset + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True)) + 1
    if end > storage.size:
        raise UnreadableError(f"a tensor ends at {end} in a storage of {storage.size} values")
    in_bytes = [stride * storage.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(storage[offset:], size, in_bytes, writeable=False)


_CONSTRUCTORS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered,
    "collections.Counter": _ordered,
    "argparse.Namespace": dict,  # a training script's arguments, beside the weights: left empty
    "torch.Size": tuple,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
}
_STORAGES = ["Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"]
_NAMES = {*_CONSTRUCTORS, *(f"torch.{name}Storage" for name in _STORAGES)}


def _known(name: str) -> Name:
    if name not in _NAMES:
        raise UnreadableError(f"the pickle names {name!r}, which is no part of weights; not read")
    return Name(name)


def _constructed(constructor: Any, arguments: Any) -> Any:
    if not isinstance(constructor, Name) or constructor not in _CONSTRUCTORS:
        raise UnreadableError(f"the pickle calls {constructor!r}, which builds no part of weights")
    return _CONSTRUCTORS[constructor](*arguments)
