"""Writes the API reference from docstrings: `python docs/build_reference.py`, one page per package in docs/reference.

Signatures and docstrings are copied from the source as they are written there, so that the pages do not depend on the
versions of Python and of other libraries.
"""

import argparse
import ast
import functools
import importlib
import importlib.util
import inspect
import pathlib
import textwrap
import types
from collections.abc import Iterable, Mapping

# Public modules beside a package's __init__, in the order in which their page has them.
MODULES = (
    *("clipping", "intervals", "noise", "losses"),
    *("finetune", "tta", "prediction", "recalibration", "split", "representations", "accuracy"),
)
DECORATORS = {"property", "functools.cached_property", "classmethod", "staticmethod"}

Definition = ast.FunctionDef | ast.ClassDef


def main() -> None:
    """Reads the flags and builds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(__file__).parent / "reference")
    build(parser.parse_args().output)


def build(output: pathlib.Path) -> None:
    """Writes all pages into the folder `output`, and removes pages that are no more."""
    pages = {package: page(package) for package in packages()} | {"index": index()}
    output.mkdir(parents=True, exist_ok=True)
    for stale in set(output.glob("*.md")) - {output / f"{name}.md" for name in pages}:
        stale.unlink()
    for name, text in pages.items():
        (output / f"{name}.md").write_text(text, encoding="utf-8")


def index() -> str:
    """The page of `jaxdp` itself: what there is, and where it is documented."""
    module = importlib.import_module("jaxdp")
    lines = ["# Reference", "", (inspect.getdoc(module) or "").splitlines()[0], ""]
    lines += ["Built from docstrings by `python docs/build_reference.py`.", "", "| package | |", "|---|---|"]
    for package in packages():
        summary = inspect.getdoc(importlib.import_module(f"jaxdp.{package}")) or ", ".join(modules(package))
        lines.append(f"| [`jaxdp.{package}`]({package}.md) | {summary.splitlines()[0]} |")
    lines += ["", "In `jaxdp` itself:", ""]
    for name in module.__all__:
        found = getattr(module, name)
        home = found.__name__ if inspect.ismodule(found) else getattr(found, "__module__", "")
        if name not in packages() and home:
            lines.append(f"- `jaxdp.{name}`: [`{home}`]({home.split('.')[1]}.md)")
    return "\n".join(lines) + "\n"


def page(package: str) -> str:
    """One package with its public modules."""
    names = [f"jaxdp.{package}", *(f"jaxdp.{package}.{module}" for module in modules(package))]
    return "\n".join(line for name in names for line in module_lines(importlib.import_module(name))).rstrip() + "\n"


def packages() -> list[str]:
    """The public packages, which `jaxdp` names."""
    module = importlib.import_module("jaxdp")
    return [name for name in module.__all__ if hasattr(getattr(module, name), "__path__")]


def modules(package: str) -> list[str]:
    """The public modules of a package."""
    return [module for module in MODULES if importlib.util.find_spec(f"jaxdp.{package}.{module}")]


def module_lines(module: types.ModuleType) -> list[str]:
    """Heading and docstring of a module; its public names, file by file."""
    lines = [f"# {module.__name__}", "", *fence("text", inspect.getdoc(module) or "")]
    names = [name for name in public_names(module) if not inspect.ismodule(getattr(module, name))]
    files: dict[str, list[str]] = {}
    for name in names:
        files.setdefault(home(module, name), []).append(name)
    foreign = sorted(name for file in files if not file.startswith("jaxdp.") for name in files[file])
    if foreign:
        libraries = sorted({file.split(".")[0] for file in files if not file.startswith("jaxdp.")})
        lines += [f"From {', '.join(libraries)}: {', '.join(f'`{name}`' for name in foreign)}.", ""]
    # Its own names come first, under its own docstring.
    order = sorted(files, key=lambda file: (file != module.__name__, file))
    own = [(file, name) for file in order for name in files[file] if name not in foreign]
    slugs = [name.lower() for _, name in own]  # of equal ones, a number tells the second from the first
    anchors = [f"{slug}-{slugs[:i].count(slug)}".removesuffix("-0") for i, slug in enumerate(slugs)]
    if own:
        lines += [", ".join(f"[{name}](#{anchor})" for (_, name), anchor in zip(own, anchors, strict=True)), ""]
    last = module.__name__
    for file, name in own:
        if file != last:
            text = ast.get_docstring(syntax(file)) or ""
            lines += [f"## {file.removeprefix('jaxdp.').replace('.', '/')}.py", "", *fence("text", text)]
            last = file
        lines += [f"### {name}", "", *described(module, name)]
    return lines


def public_names(module: types.ModuleType) -> list[str]:
    """`__all__`, or without it the functions and classes that are defined in the module."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [name for name in definitions(module.__name__) if not name.startswith("_")]


def home(module: types.ModuleType, name: str) -> str:
    """The module in which a public name is defined; for a constant, the one that it is imported from."""
    defined = getattr(getattr(module, name), "__module__", None)
    if defined is not None:
        return defined
    for node in syntax(module.__name__).body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return str(node.module)
    return module.__name__


def described(module: types.ModuleType, name: str) -> list[str]:
    """Signature, docstring and, of a class, public methods."""
    value = getattr(module, name)
    node = definitions(home(module, name)).get(getattr(value, "__name__", ""))
    if node is None:
        shown = ", ".join(map(str, value)) if isinstance(value, Mapping | tuple) else repr(value)
        return [*fence("text", textwrap.fill(shown, 120))]
    where = home(module, name)
    lines = [*fence("python", signature(node, where)), *fence("text", ast.get_docstring(node) or "")]
    for method in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(method, ast.FunctionDef) and (not method.name.startswith("_") or method.name == "__call__"):
            lines += [f"#### {name}.{method.name}", "", *fence("python", signature(method, where))]
            lines += fence("text", ast.get_docstring(method) or "")
    return lines


def signature(node: Definition, module: str) -> str:
    """A definition up to its docstring, as it is written; a class with its fields, or with its `__init__`."""
    lines = source(module).splitlines()
    if isinstance(node, ast.FunctionDef):
        kinds = [f"@{text}" for text in map(ast.unparse, node.decorator_list) if text in DECORATORS]
        last = max(node.body[0].lineno - 1, node.lineno)
        return "\n".join([*kinds, textwrap.dedent("\n".join(lines[node.lineno - 1 : last])).removesuffix(":")])
    bases = ", ".join(map(ast.unparse, node.bases))
    text = [f"class {node.name}({bases})" if bases else f"class {node.name}"]
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and not ast.unparse(part.target).startswith("_"):
            text += lines[part.lineno - 1 : part.end_lineno]
        elif isinstance(part, ast.FunctionDef) and part.name == "__init__":
            text += textwrap.indent(signature(part, module), "    ").splitlines()
    return ":\n".join([text[0], "\n".join(text[1:])]) if text[1:] else text[0]


def fence(language: str, text: str) -> Iterable[str]:
    """A block of code or of text that Markdown leaves as it is."""
    return [f"```{language}", text, "```", ""] if text else []


@functools.cache
def source(module: str) -> str:
    """The text of a module."""
    return pathlib.Path(str(importlib.import_module(module).__file__)).read_text(encoding="utf-8")


@functools.cache
def syntax(module: str) -> ast.Module:
    """Its syntax tree."""
    return ast.parse(source(module))


def definitions(module: str) -> dict[str, Definition]:
    """Its functions and classes, by name."""
    return {node.name: node for node in syntax(module).body if isinstance(node, Definition)}


if __name__ == "__main__":
    main()
