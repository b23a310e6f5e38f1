"""Every line of chosen modules as a switch point: their functions get code with a call before each statement."""

from __future__ import annotations

import ast
import contextlib
import gc
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from scheduler import primitives

POINT = "_switch_point"
"""The name under which modules find :func:`point`."""


def point() -> None:
    """A line. It raises no fault: CPython delivers signals at few lines only, and those are at calls."""
    scheduler = primitives.active()
    if scheduler is None or scheduler.current is None or scheduler.failure is not None:
        return
    scheduler.steps += 1
    if scheduler.steps >= scheduler.look_at:
        task = scheduler.current
        task.guarded += 1
        try:
            scheduler.look()
        finally:
            task.guarded -= 1


@contextlib.contextmanager
def switch_points(files: tuple[str, ...]) -> Iterator[None]:
    """While inside, each line of functions in files whose path ends with one of ``files`` is a switch point."""
    codes: dict[Any, CodeType] = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None) or ""
        if files and path.endswith(files):
            setattr(module, POINT, point)
            codes.update(_codes(path))
    functions = [each for each in _all_functions() if _key(each.__code__) in codes] if codes else []
    before = [each.__code__ for each in functions]
    for each in functions:
        each.__code__ = codes[_key(each.__code__)]
    try:
        yield
    finally:
        for each, code in zip(functions, before, strict=True):
            each.__code__ = code


def _all_functions() -> list[FunctionType]:
    frozen = gc.get_freeze_count()
    gc.unfreeze()  # which hides objects
    found = [each for each in gc.get_objects() if type(each) is FunctionType]
    if frozen:
        gc.freeze()
    return found


@cache
def _codes(path: str) -> dict[Any, CodeType]:
    """The code with switch points of each function in a file."""
    tree = with_points(ast.parse(Path(path).read_text()))
    return dict(_functions(compile(tree, path, "exec", dont_inherit=True)))


def with_points(tree: ast.Module) -> ast.Module:
    """The module with a call of :func:`point`, in its functions: before each statement, test of a loop, element of a
    comprehension, and after each block of a loop or ``with``."""
    return ast.fix_missing_locations(_Points().visit(tree))


class _Points(ast.NodeTransformer):
    def __init__(self) -> None:
        self._functions = 0  # in which the node is

    def generic_visit(self, node: ast.AST) -> ast.AST:
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        self._functions += is_function
        super().generic_visit(node)
        if self._functions:
            self._instrument(node)
        self._functions -= is_function
        return node

    def _instrument(self, node: ast.AST) -> None:
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                last = block[-1:] if field == "body" and isinstance(node, _REPEATED) else []
                block[:] = [each for statement in block for each in (_call(statement), statement)]
                block += map(_call, last)
        for kinds, field in _EXPRESSIONS:
            if isinstance(node, kinds):
                value = getattr(node, field)
                test = ast.BoolOp(ast.Or(), [_call(value).value, value])  # the call returns None
                setattr(node, field, ast.copy_location(test, value))


_EXPRESSIONS: tuple[tuple[Any, str], ...] = (
    (ast.GeneratorExp | ast.ListComp | ast.SetComp, "elt"),
    (ast.DictComp, "key"),
    (ast.Lambda, "body"),
    (ast.While, "test"),
)
_REPEATED = ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith


def _call(at: ast.AST) -> ast.Expr:
    call = ast.Call(ast.Name(POINT, ast.Load()), [], [])
    return ast.copy_location(ast.Expr(ast.copy_location(call, at)), at)


def _functions(code: CodeType) -> Iterator[tuple[Any, CodeType]]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield _key(each), each
            yield from _functions(each)


def _key(code: CodeType) -> tuple[str, str, int, tuple[str, ...]]:
    return code.co_filename, code.co_qualname, code.co_firstlineno, code.co_freevars
