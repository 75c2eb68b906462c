"""Docstrings and errors keep the conventions that a linter does not know."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE = sorted(path for folder in ("jaxdp", "launch") for path in (ROOT / folder).rglob("*.py"))


def without_a_verb(nodes: list[ast.AST]) -> Iterator[str]:
    """Yields functions whose docstring does not start with a verb in the third person, such as
    "Returns"."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            attribute = any(
                "property" in ast.unparse(decorator) for decorator in node.decorator_list
            )
            if not attribute and not re.match(r"[A-Z][a-z-]*s\b", text):
                yield f"line {node.lineno}: {node.name}: {text.splitlines()[0]}"


def without_a_full_stop(nodes: list[ast.AST]) -> Iterator[str]:
    """Yields error messages that do not end as a sentence does."""
    for node in nodes:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            message = node.exc.args[0]
            last = (
                message.values[-1]
                if isinstance(message, ast.JoinedStr) and message.values
                else message
            )
            if (
                isinstance(last, ast.Constant)
                and isinstance(last.value, str)
                and not last.value.endswith(".")
            ):
                yield f"line {node.lineno}: {ast.unparse(message)}"


def nodes_of(source: str) -> list[ast.AST]:
    """Returns the functions and the raised errors of a file."""
    return [x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.FunctionDef | ast.Raise)]


@pytest.fixture(scope="module")
def nodes() -> dict[str, list[ast.AST]]:
    return {str(path.relative_to(ROOT)): nodes_of(path.read_text()) for path in CODE}


@pytest.mark.slow
@pytest.mark.parametrize("check", [without_a_verb, without_a_full_stop])
def test_sentences(check, nodes):
    found = {path: list(check(of)) for path, of in nodes.items()}
    assert len(found) > 150 and not {path: lines for path, lines in found.items() if lines}


@pytest.mark.slow
def test_the_checks_can_fail():
    nodes = nodes_of(
        'def f(x):\n    """The sum."""\n    raise ValueError(f"x must be positive, got {x}")'
    )
    assert list(without_a_verb(nodes)) == ["line 1: f: The sum."]
    assert not list(without_a_full_stop(nodes))
    nodes = nodes_of(
        'def f(x):\n    """Returns the sum."""\n    raise ValueError("x must be positive")'
    )
    assert not list(without_a_verb(nodes))
    assert list(without_a_full_stop(nodes)) == ["line 3: 'x must be positive'"]
