"""The size and shape limits of CONTRIBUTING.md, over every tracked Python file."""

from __future__ import annotations

import ast
import gc
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("chiasm/", "gateway/", "encoder_svc/", "decoder_svc/")
FILE_LINES, FUNCTION_LINES, INIT_LINES, PARAMETERS = 400, 60, 30, 7
NO_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
# Catching everything is right where one failure must not take the rest along, and nowhere else:
# (file, how often).
CATCH_ALL = {
    "chiasm/interceptors.py": 2,  # the edge of every gRPC server
    "gateway/api/front.py": 1,  # the edge of the REST face
    "decoder_svc/engine/core.py": 1,  # the decoder's step loop
    "decoder_svc/runner/worker.py": 1,  # the end of a rank's process, which tells the engine why
    "encoder_svc/engine.py": 1,  # the encoder's step loop
}
DECLARATIONS = {"chiasm/telemetry.py"}  # __init__ is a table of metrics there
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def tracked() -> list[str]:
    command = ["git", "ls-files", "--cached", "*.py"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    generated = "chiasm/v1/"
    return [n for n in names.splitlines() if not n.startswith(generated) and (ROOT / n).is_file()]


FILES = tracked()
PRODUCT_FILES = [name for name in FILES if name.startswith(PRODUCT)]


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A kernel's parameters are its launch: pointers, sizes and constants of the compilation."""
    return any(ast.unparse(d).startswith("triton.jit") for d in node.decorator_list)


@cache
def tree(name: str) -> ast.Module:
    """Parsed once a file, and never during a collection.

    CPython 3.11 counts the parser's depth in one place: a finalizer that prints a traceback parses
    too, and the interrupted parse then fails with "AST constructor recursion depth mismatch".
    """
    gc.disable()
    try:
        return ast.parse((ROOT / name).read_text(encoding="utf-8"))
    finally:
        gc.enable()


def functions(module: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """In lines; of a kernel without its parameters, which are one a line."""
    assert node.end_lineno is not None
    first = node.body[0].lineno if is_kernel(node) else node.lineno
    return node.end_lineno - first + 1


def num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def test_the_tree_is_there() -> None:
    assert len(PRODUCT_FILES) > 40


@pytest.mark.parametrize("name", FILES)
def test_files_and_functions_are_short(name: str) -> None:
    lines = len((ROOT / name).read_text(encoding="utf-8").splitlines())
    assert lines <= FILE_LINES, f"{lines} lines"
    long = {n.name: length(n) for n in functions(tree(name)) if length(n) > FUNCTION_LINES}
    assert not long
    inits = [length(n) for n in functions(tree(name)) if n.name == "__init__"]
    if name.startswith(PRODUCT) and name not in DECLARATIONS:
        assert all(number <= INIT_LINES for number in inits), f"__init__ of {inits} lines"


@pytest.mark.parametrize("name", PRODUCT_FILES)
def test_functions_take_few_parameters(name: str) -> None:
    wide = {
        n.name: num_parameters(n)
        for n in functions(tree(name))
        if num_parameters(n) > PARAMETERS and not is_kernel(n)
    }
    assert not wide


@pytest.mark.parametrize("name", FILES)
def test_names_say_something(name: str) -> None:
    assert not NO_NAMES & set(Path(name).with_suffix("").parts)
    assert not [
        n.name for n in ast.walk(tree(name)) if isinstance(n, ast.ClassDef) and "Mixin" in n.name
    ]


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith("/__init__.py")])
def test_packages_only_re_export(name: str) -> None:
    for node in tree(name).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        dunder = isinstance(node, ast.Assign) and all(
            isinstance(t, ast.Name) and t.id.startswith("__") for t in node.targets
        )
        assert docstring or dunder or isinstance(node, ast.Import | ast.ImportFrom), ast.unparse(
            node
        )


@pytest.mark.parametrize("name", PRODUCT_FILES)
def test_everything_is_finished_and_documented(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for word in ("TODO", "FIXME", "XXX", "NotImplementedError"):
        assert word not in text
    assert ast.get_docstring(tree(name)), "no module docstring"


def catches_all(node: ast.AST) -> bool:
    """Also swallows it: a handler that tidies up and raises again hides nothing."""
    if not isinstance(node, ast.ExceptHandler):
        return False
    if isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None:
        return False
    kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(k is None or ast.unparse(k) in ("Exception", "BaseException") for k in kinds)


@pytest.mark.parametrize("name", PRODUCT_FILES)
def test_only_edges_and_step_loops_catch_everything(name: str) -> None:
    found = sum(catches_all(node) for node in ast.walk(tree(name)))
    assert found <= CATCH_ALL.get(name, 0)


@pytest.mark.parametrize("name", PRODUCT_FILES)
def test_imports_are_absolute(name: str) -> None:
    relative = [n for n in ast.walk(tree(name)) if isinstance(n, ast.ImportFrom) and n.level]
    assert not [ast.unparse(n) for n in relative]


@pytest.mark.parametrize("name", PRODUCT_FILES)
def test_modules_hold_no_mutable_state(name: str) -> None:
    """A lower-case module variable that holds a collection is state; constants are upper-case."""
    for node in tree(name).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, MUTABLE):
            names = [ast.unparse(target) for target in node.targets]
            assert all(n.strip("_").isupper() or n.startswith("__") for n in names), names


def bases_of(files: list[str]) -> dict[str, list[str]]:
    return {
        node.name: [
            base.rpartition(".")[2]
            for base in map(ast.unparse, node.bases)
            if "_pb2_grpc." not in base  # generated, not ours
        ]
        for name in files
        for node in ast.walk(tree(name))
        if isinstance(node, ast.ClassDef)
    }


def test_our_classes_inherit_one_level_deep() -> None:
    """The error tree is drawn in its module's docstring and is the exception."""
    classes = bases_of([name for name in PRODUCT_FILES if name != "chiasm/errors.py"])
    deep = {
        name: base
        for name, bases in classes.items()
        for base in bases
        if any(grandparent in classes for grandparent in classes.get(base, []))
    }
    assert not deep
