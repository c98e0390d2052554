"""Finding and checking the functions that users plug in.

Every replaceable part is named in the configuration as `module:function` or `file.py:function`.
A wrong name or a wrong signature is the user's error and must be told before the run starts, with
what was expected and what was found; never as a TypeError in the middle of a batch. This module
is the only place that turns such a name into a callable.

Files are looked up relative to the folder of the configuration file. That folder is appended to
`sys.path` (at its end, so that it never shadows an installed package): a hook may import its
neighbours.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from rollmill.errors import HookError

FORMS = "`module:function` or `file.py:function`"


@dataclass(frozen=True, slots=True)
class HookSignature:
    """What a hook is called with and what it must return.

    Attributes:
        parameters: one text per positional argument, as shown to the user (`sample: Sample`).
        returns: the return annotation, as shown to the user.
        kind: whether the hook must be a coroutine function, must not be one, or may be either.
    """

    parameters: tuple[str, ...]
    returns: str
    kind: Literal["sync", "async", "either"] = "either"

    def render(self, name: str = "function") -> str:
        """The signature as a line of Python."""
        prefix = "async " if self.kind == "async" else ""
        return f"{prefix}def {name}({', '.join(self.parameters)}) -> {self.returns}"

    @classmethod
    def like(
        cls, example: Callable[..., Any], kind: Literal["sync", "async", "either"] = "either"
    ) -> HookSignature:
        """The signature of a typed example function."""
        signature = inspect.signature(example)
        returns = signature.return_annotation
        shown = "None" if returns is inspect.Signature.empty else _annotation(returns)
        parameters = tuple(_unquoted(str(p)) for p in signature.parameters.values())
        return cls(parameters, shown, kind)


def load_hook(
    path: str, *, base_dir: Path, expected: HookSignature | None, name: str
) -> Callable[..., Any]:
    """The function that `path` names, checked against `expected` (None checks callability only).

    Args:
        path: `module:function` or `file.py:function`; attributes of classes by dots.
        base_dir: folder of the configuration file; relative files and modules are looked up there.
        expected: what the hook will be called with.
        name: where the path was given, for messages (`reward.function`).

    Raises:
        HookError: the path is malformed, nothing is there, or the signature does not fit.
    """
    source, _, attribute = path.rpartition(":")
    if not source or not attribute:
        raise HookError(
            "a hook is named by a module or file and a function in it",
            where=name,
            expected=FORMS,
            found=repr(path),
            fix="write the name of the function after a colon",
        )
    _allow_neighbours(base_dir)
    is_file = source.endswith(".py")
    module = _load_file(source, base_dir, name) if is_file else _load_module(source, name)
    hook = _attribute(module, attribute, path, name)
    if expected is not None:
        check_signature(hook, expected, path=path, name=name)
    return hook


def check_signature(
    hook: Callable[..., Any], expected: HookSignature, *, path: str, name: str
) -> None:
    """Raise HookError unless `hook` can be called as `expected` says."""
    function_name = path.rpartition(":")[2]
    found: str | None = None
    fix = "change the function's parameters to the expected ones"
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return  # a builtin without a signature cannot be checked before it is called
    try:
        signature.bind(*expected.parameters)
    except TypeError:
        found = f"def {function_name}{_shown(signature)}"
    if found is None and expected.kind != "either":
        is_async = is_coroutine_hook(hook)
        if is_async != (expected.kind == "async"):
            found = f"{'async ' if is_async else ''}def {function_name}{_shown(signature)}"
            fix = "write def instead of async def" if is_async else "write async def"
    if found is not None:
        raise HookError(
            f"the function {path!r} cannot be called as its hook requires",
            where=name,
            expected=expected.render(function_name),
            found=found,
            fix=fix,
        )


def is_coroutine_hook(hook: Callable[..., Any]) -> bool:
    """Whether calling the hook gives an awaitable (a coroutine function or such a `__call__`)."""
    return inspect.iscoroutinefunction(hook) or (
        not inspect.isfunction(hook)
        and inspect.iscoroutinefunction(getattr(hook, "__call__", None))  # noqa: B004
    )


def _shown(signature: inspect.Signature) -> str:
    return _unquoted(str(signature))


def _unquoted(signature: str) -> str:
    """A signature without the quotes that postponed annotations have."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _allow_neighbours(base_dir: Path) -> None:
    folder = str(base_dir.resolve())
    if folder not in sys.path:
        sys.path.append(folder)


def _load_file(source: str, base_dir: Path, name: str) -> ModuleType:
    file = (base_dir / Path(source).expanduser()).resolve()
    if not file.is_file():
        raise HookError(
            "the file of a hook does not exist",
            where=name,
            expected="a Python file, absolute or relative to the configuration file's folder",
            found=str(file),
            fix=_nearest([p.name for p in file.parent.glob("*.py")], file.name) or "check the path",
        )
    module_name = f"rollmill_hook_{file.stem}_{hashlib.sha256(bytes(file)).hexdigest()[:12]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    _allow_neighbours(file.parent)
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise HookError(
            "the file of a hook cannot be imported",
            where=name,
            found=str(file),
            fix="name a file that ends in .py",
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_name]
        # Policy: whatever the user's module raises while it is imported is the user's error, and
        # so is its `sys.exit()`; interrupts pass through.
        if not isinstance(error, Exception | SystemExit):
            raise
        raise _import_failed(str(file), name, error) from error
    return module


def _load_module(source: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not (source == error.name or source.startswith(f"{error.name}.")):
            raise _import_failed(source, name, error) from error
        raise HookError(
            f"the module of a hook does not exist: no module named {error.name!r}",
            where=name,
            expected="an installed module, or one in the configuration file's folder",
            found=repr(source),
            fix="install it, or name the file instead: `file.py:function`",
        ) from error
    except (Exception, SystemExit) as error:  # policy as in _load_file
        raise _import_failed(source, name, error) from error


def _import_failed(source: str, name: str, error: Exception | SystemExit) -> HookError:
    return HookError(
        "importing the module of a hook raised",
        where=f"{name} ({_raised_at(source, error)})",
        expected="a module that can be imported",
        found=f"{type(error).__name__}: {error}",
        fix="mend the module, or install what it imports",
    )


def _raised_at(source: str, error: Exception | SystemExit) -> str:
    """`file:line` of the last line of the user's that ran, or else the module's name."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if f.filename == source or Path(f.filename).stem == source]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else source


def _attribute(module: ModuleType, attribute: str, path: str, name: str) -> Callable[..., Any]:
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            callables = [k for k, v in vars(value).items() if callable(v) and k[0] != "_"]
            raise HookError(
                f"the module of a hook has no function {attribute!r}",
                where=name,
                expected=f"one of {', '.join(sorted(callables)[:12]) or '(it has none)'}",
                found=repr(path),
                fix=_nearest(callables, part) or "check the function's name",
            )
        value = getattr(value, part)
    if not callable(value):
        raise HookError(
            "a hook names something that is not a function",
            where=name,
            expected="a function",
            found=f"{path!r} is {type(value).__name__}",
            fix="name a function",
        )
    return value  # type: ignore[no-any-return]


def _nearest(names: list[str], wanted: str) -> str | None:
    close = difflib.get_close_matches(wanted, names, n=1)
    return f"did you mean {close[0]!r}?" if close else None
