"""What the capture of a user's model depends on, as one hash.

    files      The content of every loaded Python file that no package manager installed.
    packages   For their classes and functions: size and time of the module's file, and the package's version.
    values     The values of the model. The closures, defaults and globals that functions of those files name.
    inputs     Form, shapes and dtypes of tensors. Every other argument by value.
    torch      Version, default dtype, autocast.

Weights count by shape and dtype, all other tensors by value. So do the buffers that a job holds for a model on meta. If
a value hides its content, nothing is known, and the model is captured at every start.
"""

import hashlib
import os
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar._torch.private import pytree
from autopar.capture.passes.autocast import ambient_autocast
from autopar.capture.request import Request

MOST_VALUES, MOST_TENSOR_BYTES = 1_000_000, 256_000_000  # of one walk; a model that holds more is not kept
_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type(...), range, slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
_INSTALLED = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(path for path in sys.path if path.endswith(("site-packages", "dist-packages"))),  # such as the user's
)
_HEAP_TYPE = 1 << 9  # a flag of classes that are no static ones of C
_OWN = str(Path(__file__).parents[1])  # autopar's source is a part of the version of what is kept
_NAMED = ("torch._ops", "torch._C")  # operators and such, which hold caches
_UNREAD = frozenset(
    ["__dict__", "__weakref__", "__doc__", "__annotations__", "__module__", "__slotnames__", "_abc_impl"]
)


class _UnknownError(Exception):
    """A value hides its content."""


def request_digest(request: Request) -> str | None:
    """The hash of all that the program of a request depends on. None if that is not known."""
    leaves, form = pytree.tree_flatten(request.inputs)
    shapes = [(tuple(v.shape), v.dtype, v.requires_grad) if isinstance(v, torch.Tensor) else v for v in leaves]
    walk = _Walk()
    try:
        walk.add([torch.__version__, torch.get_default_dtype(), torch.get_default_device(), str(ambient_autocast())])
        walk.add([str(form), shapes])
        walk.add([request.training, request.products, request.staged, request.reading.specialise])
        walk.add([request.model, request.loss_fn])
        if (held := request.reading.buffers) is not None:
            walk.add({name: held(name) for name, buffer in request.model.named_buffers() if buffer.is_meta})
        walk.add(own_files())
    except Exception:  # `_UnknownError`, or whatever an object of the user raises when it is read
        return None
    return walk.text.hexdigest()


def own_files() -> tuple[tuple[str, bytes], ...]:
    """Name and content of every loaded Python module that no package manager installed."""
    files = ((name, getattr(module, "__file__", None)) for name, module in sorted(sys.modules.items()))
    return tuple(
        (name, Path(file).read_bytes())
        for name, file in files
        if isinstance(file, str) and file.endswith(".py") and not _is_library(name) and os.path.isfile(file)
    )


class _Walk:
    """Adds values to a hash, each object once."""

    def __init__(self) -> None:
        self.text = hashlib.sha256()
        self._seen: dict[int, tuple[int, Any]] = {}  # the object is kept, so that no other one gets its id
        self._bytes = 0

    def add(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, types.ModuleType):
            return self._module(value.__name__)
        if kind in _ATOMS:
            return self._write(kind.__name__, repr(value))
        if id(value) in self._seen:
            return self._write("again", self._seen[id(value)][0])
        if len(self._seen) >= MOST_VALUES:
            raise _UnknownError(type(value))
        self._seen[id(value)] = len(self._seen), value
        self._write(kind.__module__, kind.__qualname__)
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, (set, frozenset)):
            self._all(sorted(map(repr, value)) if all(type(item) in _ATOMS for item in value) else value)
        elif isinstance(value, (dict, types.MappingProxyType)):
            self._all(part for item in value.items() for part in item)
            self._attributes(value)
        elif isinstance(value, (list, tuple, deque)):
            self._all(value)
            self._attributes(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._all((value.__func__, value.__self__))
        elif isinstance(value, (staticmethod, classmethod)):
            self.add(value.__func__)
        elif isinstance(value, property):
            self._all((value.fget, value.fset))
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, partial):
            self._all((value.func, value.args, value.keywords))
        elif kind.__module__ in _NAMED:
            self._write(value)
        elif kind.__module__ != "logging":
            self._object(value)

    def _all(self, values: Iterable[Any]) -> None:
        self._write("(")
        for value in values:
            self.add(value)
        self._write(")")

    def _write(self, *words: object) -> None:
        self.text.update("\0".join(map(str, words)).encode() + b"\1")

    def _tensor(self, value: torch.Tensor) -> None:
        self._write(tuple(value.shape), value.dtype, value.layout, value.device.type, value.requires_grad)
        self.add({name: held for name, held in vars(value).items() if name not in ("grad", "_grad_fn")})
        if isinstance(value, nn.Parameter) or value.device.type == "meta":
            return
        self._bytes += value.numel() * value.element_size()
        if value.layout != torch.strided or value.is_quantized or self._bytes > MOST_TENSOR_BYTES:
            raise _UnknownError(type(value))
        if value.requires_grad and value.grad_fn is not None:
            return  # computed of weights, such as the weight of a weight norm
        self.text.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    def _function(self, function: types.FunctionType) -> None:
        """A function, what it closes over, and the globals that it names. A package's own globals are its file's."""
        code = function.__code__
        self._write(function.__module__, function.__qualname__)
        self._all((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            if cell != types.CellType():
                self.add(cell.cell_contents)
        if _is_installed(code.co_filename):
            return self._module(function.__module__)
        names, texts = set[str](), set[str]()
        for part in _codes(code):
            names.update(part.co_names)
            texts.update(text for text in part.co_consts if isinstance(text, str))
            self._write(part.co_code.hex(), part.co_flags, part.co_names, part.co_varnames)
            self._write(part.co_exceptiontable.hex(), [_constant(c) for c in part.co_consts])
        if names & {"environ", "getenv"}:
            self.add([os.environ.get(text) for text in sorted(texts)])
        for name in sorted(names & function.__globals__.keys()):
            self._named(function.__globals__[name], names)

    def _named(self, value: Any, names: set[str]) -> None:
        """A global, and what functions take of it if it is a module of the user's."""
        self.add(value)
        if isinstance(value, types.ModuleType) and not _is_library(value.__name__):
            for name in sorted(names & vars(value).keys()):
                if id(vars(value)[name]) not in self._seen:
                    self._named(vars(value)[name], names)

    def _class(self, kind: type) -> None:
        """A class: of a package by its file, apart from functions that the user has put into it."""
        for base in kind.__mro__:
            if id(base) in self._seen and base is not kind:
                continue
            self._seen.setdefault(id(base), (len(self._seen), base))
            is_own = not _is_library(base.__module__)
            self._write(base.__module__, base.__qualname__)
            if not is_own:
                self._module(base.__module__)
            for name, value in sorted(vars(base).items()):
                inner = getattr(value, "__func__", value)
                is_put = isinstance(inner, types.FunctionType) and not _is_installed(inner.__code__.co_filename)
                if (is_own or is_put) and name not in _UNREAD and not isinstance(value, types.MemberDescriptorType):
                    self._write(name)
                    self.add(value)

    def _module(self, name: str) -> None:
        """The version of an installed module and of its package, and its numbers, which settings change."""
        module = sys.modules.get(name)
        if module is None or id(module) in self._seen or not _is_library(name):
            return self._write(name)
        self._seen[id(module)] = len(self._seen), module
        self._write(name, _stamp(getattr(module, "__file__", None)))
        for key, value in sorted(vars(module).items()):
            is_put = isinstance(value, types.FunctionType) and not _is_installed(value.__code__.co_filename)
            is_setting = type(value) in (bool, int, float)
            if is_put or (is_setting and not name.startswith(("torch.", "autopar."))):
                self._all((key, value))
        package = sys.modules.get(name.partition(".")[0])
        self._write(getattr(package, "__version__", ""), _stamp(getattr(package, "__file__", None)))

    def _object(self, value: Any) -> None:
        """An object: its attributes, and what a copy is made of where C code holds the content."""
        kind = type(value)
        has_attributes = self._attributes(value)
        base = next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE)
        if has_attributes and base in (object, type):
            return
        try:
            parts = value.__reduce_ex__(4)
        except Exception:
            if not has_attributes and not _is_library(kind.__module__):
                raise _UnknownError(kind) from None
            return  # such as a lock or a generator
        self._all((parts,) if isinstance(parts, str) else [list(x) if hasattr(x, "__next__") else x for x in parts])

    def _attributes(self, value: Any) -> bool:
        """The class of an object and its attributes. Whether it can have any."""
        kind = type(value)
        self.add(kind)
        if kind is types.MappingProxyType:
            return False
        state = object.__getstate__(value)
        parts = state if isinstance(state, tuple) else (state,)  # the attributes, and the slots
        held = {name: inner for part in parts if part for name, inner in part.items()}
        is_library = _is_library(kind.__module__)
        for name, inner in held.items():
            if not (is_library and _is_hash(name, inner)):
                self._all((name, inner))
        return bool(held) or hasattr(value, "__dict__")


def _codes(code: types.CodeType) -> Iterable[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _constant(value: object) -> object:
    """A constant of code as one that has a text. The functions inside are read by themselves."""
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    return None if isinstance(value, types.CodeType) else value


def _is_hash(name: str, value: object) -> bool:
    """Whether a private attribute of a library's object is a hash or an id, which differs in every process."""
    return name.startswith("_") and type(value) is int and value.bit_length() > 48


@cache
def _is_installed(file: str) -> bool:
    """Whether a file is of Python, of an installed package or of autopar."""
    return file.startswith(("<frozen", *_INSTALLED, _OWN)) or os.path.realpath(file).startswith((*_INSTALLED, _OWN))


def _is_library(name: str) -> bool:
    """Whether a module is of Python, of an installed package or of autopar."""
    file = getattr(sys.modules.get(name), "__file__", None)
    is_python = name.partition(".")[0] in (*sys.stdlib_module_names, "autopar")
    return is_python or (isinstance(file, str) and _is_installed(file))


@cache
def _stamp(file: str | None) -> str:
    """The size and the time of a file, by which Python too knows whether a module has changed."""
    if file is None or not os.path.isfile(file):
        return ""
    about = os.stat(file)
    return f"{about.st_size} {about.st_mtime_ns}"
