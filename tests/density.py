"""How dense the code is: python tests/density.py [FOLDER ...] prints a row per folder.

Docstrings are left out, because a sentence is read differently from code.
`tests/test_density.py` holds the limits. Columns of the table:

    lines        lines of code
    tokens       names, operators, numbers and strings
    a line       tokens per line of code
    nodes        nodes of the syntax tree per statement
    comments     lines of comment per 100 lines of code
    wide         lines of more than 100 columns, docstrings and comments included
    long         functions of more than 60 lines of code
    parameters   functions of more than 8 parameters
    large        files of more than 700 lines
    vague        assignments to names that say nothing, such as `found`
    loops        comprehensions with two loops or with two conditions
"""

import ast
import dataclasses
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 100
FUNCTION_LINES = 60
PARAMETERS = 8
FILE_LINES = 700
VAGUE = {"found", "made", "kept", "given", "parts", "how", "asked", "wanted"}
COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LOOKED_AT = (*FUNCTIONS, *COMPREHENSIONS, ast.Assign)


@dataclasses.dataclass
class Density:
    """Counts over files. See the top of this file."""

    lines: int = 0
    tokens: int = 0
    nodes: int = 0
    statements: int = 0
    comments: int = 0
    wide: list[str] = dataclasses.field(default_factory=list)
    long: list[str] = dataclasses.field(default_factory=list)
    parameters: list[str] = dataclasses.field(default_factory=list)
    large: list[str] = dataclasses.field(default_factory=list)
    vague: list[str] = dataclasses.field(default_factory=list)
    loops: list[str] = dataclasses.field(default_factory=list)

    @property
    def tokens_a_line(self) -> float:
        return self.tokens / max(self.lines, 1)

    @property
    def nodes_a_statement(self) -> float:
        return self.nodes / max(self.statements, 1)

    @property
    def comments_of_100(self) -> float:
        return 100 * self.comments / max(self.lines, 1)

    def add(self, name: str, source: str) -> None:
        """Counts one file."""
        tree = list(ast.walk(ast.parse(source)))
        prose = docstring_lines(tree)
        code: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            self.comments += token.type == tokenize.COMMENT
            if token.type in COUNTED and token.start[0] not in prose:
                self.tokens += 1
                code.add(token.start[0])
        self.lines += len(code)
        every = source.splitlines()
        if len(every) > FILE_LINES:
            self.large.append(f"{name}: {len(every)} lines")
        for number, line in enumerate(every, start=1):
            if len(line) > COLUMNS:
                self.wide.append(f"{name}:{number}")
        self.nodes += len(tree)
        for node in tree:
            self.statements += isinstance(node, ast.stmt)
            if isinstance(node, LOOKED_AT):
                self._look_at(node, name, code)

    def _look_at(self, node: ast.AST, name: str, code: set[int]) -> None:
        if isinstance(node, FUNCTIONS):
            place = f"{name}:{node.lineno}: {node.name}"
            body = sum(node.lineno <= line <= (node.end_lineno or 0) for line in code)
            if body > FUNCTION_LINES:
                self.long.append(f"{place}, {body} lines")
            arguments = node.args
            count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
            if count > PARAMETERS:
                self.parameters.append(f"{place}, {count} parameters")
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id in VAGUE:
                    self.vague.append(f"{name}:{node.lineno}: {target.id}")
        if isinstance(node, COMPREHENSIONS):
            conditions = sum(len(loop.ifs) for loop in node.generators)
            if len(node.generators) > 1 or conditions > 1:
                self.loops.append(f"{name}:{node.lineno}")


def docstring_lines(nodes: Iterable[ast.AST]) -> set[int]:
    """Returns the numbers of the lines that docstrings take."""
    numbers: set[int] = set()
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(
            node, clean=False
        ):
            numbers.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return numbers


def measured(paths: Iterable[Path]) -> Density:
    """Returns the density of some files together."""
    density = Density()
    for path in paths:
        density.add(path.relative_to(ROOT).as_posix(), path.read_text())
    return density


def folders() -> Iterator[tuple[str, list[Path]]]:
    """Yields each package of jaxdp, the files beside them, and the launchers, with their files."""
    for folder in sorted(path for path in (ROOT / "jaxdp").iterdir() if path.is_dir()):
        if files := sorted(folder.rglob("*.py")):
            yield f"jaxdp/{folder.name}", files
    yield "jaxdp/*.py", sorted((ROOT / "jaxdp").glob("*.py"))
    yield "launch", sorted((ROOT / "launch").rglob("*.py"))


def main(chosen: list[str]) -> None:
    heads = ("lines", "tokens", "a line", "nodes", "comments")
    lists = ("wide", "long", "parameters", "large", "vague", "loops")
    print(f"{'':22}" + "".join(f"{head:>11}" for head in (*heads, *lists)))
    rows = [(name, measured(files)) for name, files in folders()]
    rows.append(("jaxdp in all", measured(sorted((ROOT / "jaxdp").rglob("*.py")))))
    for name, density in rows:
        if chosen and name not in chosen:
            continue
        numbers = [density.tokens_a_line, density.nodes_a_statement, density.comments_of_100]
        cells = [str(density.lines), str(density.tokens), *(f"{x:.1f}" for x in numbers)]
        cells += [str(len(getattr(density, kind))) for kind in lists]
        print(f"{name:22}" + "".join(f"{cell:>11}" for cell in cells))
        for kind in lists if chosen else ():
            print("".join(f"  {kind:11} {place}\n" for place in getattr(density, kind)), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
