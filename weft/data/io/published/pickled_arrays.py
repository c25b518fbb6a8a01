"""Reading of NumPy arrays and SciPy CSR matrices in pickled files of Python 2, without unpickling.

A pickle is a program: Python's unpickler imports and calls what it names. This reader instead interprets the few
instructions that Python 2 wrote for arrays, CSR matrices, and lists and dicts of numbers. It looks names up in a table
and imports nothing. Whatever else a file contains is an error.
"""

from __future__ import annotations

import codecs
import io
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.utils.files.file_reading import read_bytes

MAX_PICKLE_BYTES = 1 << 28
"""Largest pickled file that is read."""
INSTRUCTIONS = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
"""Instructions by their byte."""
MARK = object()
"""Place on the stack where the elements of a list, tuple or dict begin."""
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "MARK": MARK}
"""Values of instructions that put a constant on the stack."""
LITERALS = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE"),
)
"""Instructions that put their argument on the stack, a number or a text."""
CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "LIST": list,
    "TUPLE": tuple,
    "DICT": lambda items: dict(zip(items[::2], items[1::2], strict=True)),
}
"""Instructions that make a container of all values above the mark."""


@dataclass
class PickledDtype:
    """Dtype of numbers: kind and bytes such as f4, and the state with the byte order."""

    name: str
    state: tuple[Any, ...] = (3, "=")

    def dtype(self) -> np.dtype[Any]:
        """Return the dtype.

        Raises:
            ValueError: It is none of numbers.
        """
        if not re.fullmatch("[biuf][1248]", self.name) or self.state[1] not in "<>=|":
            raise ValueError(f"it contains an array of {self.name}, and only numbers are read")
        return np.dtype(f"{self.state[1]}{self.name}")


@dataclass
class PickledArray:
    """NumPy array: its state is version, shape, dtype, whether it is stored by columns, and the bytes as Latin-1."""

    state: tuple[Any, ...] = ()

    def array(self) -> NDArray[Any]:
        """Return the array."""
        _, shape, dtype, by_columns, content = self.state
        numbers = np.frombuffer(content.encode("latin-1"), dtype.dtype())
        return numbers.reshape(shape, order="F" if by_columns else "C").copy()


@dataclass
class PickledCsr:
    """SciPy CSR matrix: its state is a dict of attributes."""

    state: dict[str, Any] = field(default_factory=dict)

    def part(self, name: str) -> NDArray[Any]:
        """Return data, indices or indptr."""
        part = self.state[name]
        if not isinstance(part, PickledArray):
            raise ValueError(f"its {name} is no array")
        return part.array()

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        rows, columns = self.state["_shape"]
        return int(rows), int(columns)


@dataclass(frozen=True)
class PickledName:
    """Name in a pickle."""

    name: str

    def call(self, arguments: tuple[Any, ...]) -> Any:
        """Return what stands for the result of a call.

        Raises:
            ValueError: Arrays need no such call.
        """
        match self.name, arguments:
            case "numpy dtype", (str() as name, *_):
                return PickledDtype(name)
            case "numpy.core.multiarray _reconstruct", (PickledName("numpy ndarray"), *_):
                return PickledArray()
            case "copy_reg _reconstructor", (PickledName("scipy.sparse.csr csr_matrix"), *_):
                return PickledCsr()
            case "scipy.sparse.csr csr_matrix", ():
                return PickledCsr()
            case "collections defaultdict", (PickledName("__builtin__ list"),):
                return {}
            case "_codecs encode", (str() as text, "latin1"):
                return text
        raise ValueError(f"it calls {self.name}, which arrays of numbers do not need")


def read_pickled(path: Path) -> Any:
    """Return the content of a file: a NumPy array, a `PickledCsr`, or lists and dicts of numbers.

    Args:
        path: The file.

    Raises:
        InputError: The file is larger than such files are.
        ValueError: The file contains anything else. Damaged bytes may raise errors of any type.
    """
    value = interpret(read_bytes(path, MAX_PICKLE_BYTES))
    return value.array() if isinstance(value, PickledArray) else value


def interpret(data: bytes) -> Any:
    """Return what a pickle of protocol 0, 1 or 2 describes, with objects of this file for arrays and matrices.

    Args:
        data: Content of the file.

    Raises:
        ValueError: An instruction or a call is not one that arrays need.
    """
    file, stack, memo = io.BytesIO(data), list[Any](), dict[int, Any]()

    def above_mark() -> list[Any]:
        position = max(index for index, value in enumerate(stack) if value is MARK)
        values = stack[position + 1 :]
        del stack[position:]
        return values

    while True:
        opcode = INSTRUCTIONS[file.read(1)]
        argument = read_argument(file, opcode)
        match opcode.name:
            case "PROTO":
                pass
            case name if name in LITERALS:
                stack.append(argument)
            case name if name in CONSTANTS:
                stack.append(CONSTANTS[name])
            case "EMPTY_LIST" | "EMPTY_TUPLE" | "EMPTY_DICT" as name:
                stack.append(CONTAINERS[name.removeprefix("EMPTY_")]([]))
            case name if name in CONTAINERS:
                stack.append(CONTAINERS[name](above_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                size = int(name[-1])
                stack[-size:] = [tuple(stack[-size:])]
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "APPEND" | "APPENDS" as name:
                values = above_mark() if name == "APPENDS" else [stack.pop()]
                typed(stack[-1], list).extend(values)
            case "SETITEM" | "SETITEMS" as name:
                values = above_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                typed(stack[-1], dict).update(CONTAINERS["DICT"](values))
            case "GLOBAL":
                stack.append(PickledName(argument))
            case "REDUCE" | "NEWOBJ":
                arguments, function = stack.pop(), stack.pop()
                stack.append(typed(function, PickledName).call(typed(arguments, tuple)))
            case "BUILD":
                state = stack.pop()
                typed(stack[-1], PickledDtype, PickledArray, PickledCsr).state = state
            case "STOP":
                return stack.pop()
            case name:
                raise ValueError(f"it has the instruction {name}, which arrays of numbers do not need")


def read_argument(file: io.BytesIO, opcode: pickletools.OpcodeInfo) -> Any:
    """Return the argument that follows an instruction, None without one; bytes as text in Latin-1.

    Args:
        file: The file, after the instruction.
        opcode: The instruction.
    """
    if opcode.name == "STRING":  # pickletools reads only ASCII here
        return codecs.escape_decode(file.readline().strip()[1:-1])[0].decode("latin-1")
    return None if opcode.arg is None else opcode.arg.reader(file)


def typed(value: Any, *types: type) -> Any:
    """Return a value after a check of its type.

    Raises:
        ValueError: It has another type.
    """
    if type(value) not in types:
        raise ValueError(f"it uses a {type(value).__name__} in place of a {types[0].__name__}")
    return value
