"""Which code made the cells of a workdir, and what to do with cells that other code made.

A cell keeps its code in code.json, beside row.json:

    library   version and digest of the source of jaxdp
    modules   a digest for each module that belongs to the user or has a method that the cell names

A method of a registry counts for a cell if its name is a word of the cell or of the config, and is
not that of another cell. Of a part of the config with an entry for the cell, such as
`methods.AdpClip` for the cell "AdpClip", the entries of other cells do not count. With its module
count the modules that this one imports, unless they are of jaxdp, of Python or of an installed
package. A digest leaves out comments, docstrings and layout.

An edited module is an error, because only the user knows whether the results still hold. To compute
them again may pay again. Another source of jaxdp is only told: an upgrade keeps a workdir usable.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import itertools
import json
import pathlib
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxdp.files import read_json, shown, write_json
from jaxdp.release import locked
from jaxdp.release.identity import versions

from ..study import Study
from .workdir import cell_folder

STALE = ("keep", "redo", "redo_all")
NAME = "code.json"
ASIDE = "stale"  # the folder of a workdir with what was set aside
_REGISTRIES = {
    "METHODS": ("finetune", "pretrain", "prediction", "recalibration", "split", "tta"),
    "CLIP_RULES": ("transforms.clip_rules",),
    "FORMATS": ("data.spec",),
}
_OURS = ("jaxdp", "launch", "configs")
_INSTALLED = tuple(
    pathlib.Path(sysconfig.get_paths()[kind]) for kind in ("stdlib", "platstdlib", "purelib")
)


class Code(NamedTuple):
    """The code of a cell.

    Attributes:
      library: The version of jaxdp, and the digest of its source.
      modules: Digests by the names of modules.
    """

    library: Sequence[str]
    modules: Mapping[str, str]


def of(study: Study, config: Any, cells: Sequence[Any]) -> dict[Any, Code]:
    """Returns the code that this process would run for each cell."""
    fields = json.loads(config.to_json())
    coordinates = itertools.chain.from_iterable(cells)
    labels = {name for name in coordinates if isinstance(name, str)}
    rows = _rows()
    common = _closure(filter(callable, vars(study).values()), rooted=False)
    codes = {}
    for cell in cells:
        words = _words(_entries(fields, {*cell} & labels, labels))
        others: set[str] = set()
        for field in cell._fields:
            others |= _words(getattr(other, field, "") for other in cells)
        own = _words(cell)
        named = [row for name, row in rows if name in own | (words - others)]
        places = [place for place in words if re.fullmatch(r"[\w.]+:\w+", place)]
        modules = common | _closure(named, rooted=True)
        for place in places:
            modules |= _of_place(place.partition(":")[0])
        codes[cell] = Code(_library(), dict(sorted(modules.items())))
    return codes


def _entries(part: Any, own: set[str], labels: set[str]) -> Iterator[Any]:
    """Yields the values of a config that count for a cell, whose names are `own` of all `labels`.

    Without an entry for the cell it is not known which entry it reads, and all count.
    """
    if not isinstance(part, dict):
        yield part
        return
    others = labels - own if own & part.keys() else set[str]()
    for name, entry in part.items():
        if name not in others:
            yield from _entries(entry, own, labels)


def write(folder: pathlib.Path, code: Code | None) -> None:
    """Writes the code of a cell, unless an interrupted run has left results in its folder."""
    if code is not None and _stored(folder) is None:
        write_json(folder / NAME, code._asdict())


def settle(
    study: Study, config: Any, root: pathlib.Path, cells: Sequence[Any], stale: str, *, dry: bool
) -> None:
    """Compares the code of the cells in a workdir with that of this process.

    Args:
      study: The study.
      config: The config, which is that of the workdir.
      root: The workdir.
      cells: All cells of the study.
      stale: "keep" takes cells of other code. "redo" sets those aside whose code was edited, and
        "redo_all" also those of another source of jaxdp, and those that do not say. "" refuses
        edited code.
      dry: Whether nothing is to be written.

    Raises:
      ValueError: The code of a cell was edited, and `stale` is "".
      BlockingIOError: Another process runs a cell that is to be set aside.
    """
    begun = _begun(root, cells)
    if not begun:
        return
    now = of(study, config, cells)
    edited, changed = [], dict[str, None]()
    older = []
    for cell, code in begun.items():
        names = _edited(code, now[cell])
        changed |= dict.fromkeys(names)
        if names:
            edited.append(cell)
        elif list(code.library) != list(now[cell].library):
            older.append(cell)
    count = len(begun)
    if edited and not stale:
        raise ValueError(
            f"{len(edited)} of {count} cells in {shown(root)} were computed before "
            f"{', '.join(changed)} changed. --stale=redo sets them aside and computes them again, "
            "which pays again for private data. --stale=keep takes them as they are."
        )
    again = {"redo": edited, "redo_all": [*edited, *older]}.get(stale, [])
    if older and stale in ("", "redo"):
        _say_older(older, begun, count)
    if edited and stale == "keep":
        print(f"{len(edited)} of {count} cells are of other code: {', '.join(changed)} changed.")
    if again:
        print(f"{len(again)} of {count} cells are computed again, since their code changed.")
    if again and not dry:
        _set_aside(root, again, whole=len(again) == count)


def told(root: pathlib.Path, now: Mapping[Any, Code]) -> str:
    """Returns a sentence if cells of a workdir were made by different code, or by other code than
    that of this process. Otherwise "".
    """
    before = _begun(root, now)
    modules = [code.modules for code in before.values()]
    differ = set[str]()
    for name in set[str]().union(*modules):
        if len({one[name] for one in modules if name in one}) > 1:
            differ.add(name)
    if differ:
        return f"The rows are of different code: {', '.join(sorted(differ))} changed between them."
    edited = set[str]()
    for cell, code in before.items():
        edited.update(_edited(code, now[cell]))
    if edited:
        return f"The rows are of earlier code: {', '.join(sorted(edited))} changed after them."
    return ""


def _say_older(older: Sequence[Any], begun: Mapping[Any, Code], count: int) -> None:
    """Prints which cells another source of jaxdp made, and which do not say what made them."""
    made_by = {cell: begun[cell].library for cell in older}
    silent = [cell for cell, library in made_by.items() if not library]
    if silent:
        print(
            f"{len(silent)} of {count} cells do not say which code computed them. An earlier "
            "version of jaxdp wrote them. --stale=redo_all computes them again."
        )
    if len(silent) < len(older):
        print(
            f"{len(older) - len(silent)} of {count} cells were computed by another source of "
            "jaxdp. --stale=redo_all computes them again."
        )


def _begun(root: pathlib.Path, cells: Iterable[Any]) -> dict[Any, Code]:
    """Returns the code of each cell that has results."""
    stored = {cell: _stored(cell_folder(root, cell)) for cell in cells}
    return {cell: code for cell, code in stored.items() if code is not None}


def _stored(folder: pathlib.Path) -> Code | None:
    """Returns the code of a cell, None for a cell that has no results."""
    path = folder / NAME
    files = (file.name for file in folder.rglob("*") if file.is_file())
    if all(name == NAME or name.endswith("lock") for name in files):
        return None  # A method that failed at once may be mended.
    if path.exists():
        return Code(**read_json(path, remedy="Delete it. The cell then does not say its code."))
    return Code((), {})


def _edited(before: Code, now: Code) -> list[str]:
    """Returns the modules of a cell that were edited. Those of another release of jaxdp were
    not.
    """
    same_release = before.library[:1] == now.library[:1]
    names = []
    for name, digest in before.modules.items():
        counts = same_release or not _is_ours(name)
        if counts and now.modules.get(name, digest) != digest:
            names.append(name)
    return names


def _set_aside(root: pathlib.Path, cells: Sequence[Any], *, whole: bool) -> None:
    """Moves cells below the folder `ASIDE`. With `whole`, also all that they share.

    The ledgers of the workdir stay, so a cell that is computed again pays again. A ledger that is
    one cell's own moves with it.
    """
    numbers = [int(path.name) for path in root.glob(f"{ASIDE}/*") if path.name.isdecimal()]
    aside = root / ASIDE / str(max(numbers, default=0) + 1)  # a user may delete older ones
    with contextlib.ExitStack() as held:
        for cell in cells:
            folder = cell_folder(root, cell)
            held.enter_context(locked(folder.with_name(f"{folder.name}.lock"), wait=False))
        for cell in cells:
            _move(cell_folder(root, cell), root, aside)
        shared = sorted(root.iterdir()) if whole else [root / "result.json"]
        for path in shared:
            stays = path.name in ("config.json", "cells", ASIDE) or re.search(
                r"\.sqlite|\.head|\.anchor|lock$", path.name
            )
            if path.exists() and not stays:
                _move(path, root, aside)


def _move(path: pathlib.Path, root: pathlib.Path, aside: pathlib.Path) -> None:
    target = aside / path.relative_to(root)
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)


# --- Modules and their digests ------------------------------------------------------------------


def _words(values: Iterable[Any]) -> set[str]:
    """Returns the words of texts, in lists too, and the texts themselves."""
    words = set[str]()
    for value in values:
        if isinstance(value, str):
            words |= {value, *re.split(r"\W+", value)}
        elif isinstance(value, list | tuple):
            words |= _words(value)
    return words


def _rows() -> list[tuple[str, Any]]:
    """Returns names and entries of the registries that are imported."""
    rows: list[tuple[str, Any]] = []
    for table, modules in _REGISTRIES.items():
        for name in modules:
            module = sys.modules.get(f"jaxdp.{name}")
            rows += getattr(module, table, {}).items()
    return rows


def _closure(objects: Iterable[Any], *, rooted: bool) -> dict[str, str]:
    """Returns the digests of the modules of objects, and of the user's modules that they import.

    With `rooted`, a module of an object counts also if it is of jaxdp or installed.
    """
    digests: dict[str, str] = {}
    for one in objects:
        one = _unwrapped(one)
        name = one.__name__ if inspect.ismodule(one) else getattr(one, "__module__", "")
        module = sys.modules.get(name)
        if module is None:
            continue
        if getattr(module, "__file__", None) is None:
            digests |= _of_a_cell(one)
        elif rooted or _is_own(module.__name__, module.__file__):
            digests |= _followed(name)
    return digests


def _of_place(name: str) -> dict[str, str]:
    """Returns the digests of a module whose function a config names, and of what it imports.

    Finished cells are compared before the study opens its data, which imports the module.
    """
    if name in sys.modules:
        return _closure([sys.modules[name]], rooted=True)
    return _followed(name) if _is_followed(name) else {}


def _unwrapped(one: Any) -> Any:
    while isinstance(one, functools.partial):
        one = one.func
    if inspect.isclass(one) or inspect.isroutine(one) or inspect.ismodule(one):
        unwrapped: Any = one
        return inspect.unwrap(unwrapped)
    return type(one)


def _of_a_cell(one: Any) -> dict[str, str]:
    """Returns the digest of what a cell of a notebook defines."""
    with contextlib.suppress(OSError, TypeError):
        return {f"{one.__module__}.{one.__qualname__}": _digest(inspect.getsource(one))}
    return {}


def _followed(first: str) -> dict[str, str]:
    digests: dict[str, str] = {}
    waiting = [first]
    while waiting:
        name = waiting.pop()
        spec = _spec(name)
        title = spec.name if spec else pathlib.Path(sys.modules[name].__file__ or "").stem
        if title in digests:
            continue
        digests[title], imported = _source(name)
        if not _is_ours(title):
            waiting += filter(_is_followed, imported)
    return digests


def _is_followed(name: str) -> bool:
    spec = _spec(name)
    return spec is not None and spec.has_location and _is_own(name, spec.origin)


def _spec(name: str) -> Any:
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    top = name.partition(".")[0]
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(top)
        if top == name:
            return spec
        if spec is not None and _is_own(top, spec.origin):
            return importlib.util.find_spec(name)
    return None


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] in _OURS


def _is_own(name: str, origin: str | None) -> bool:
    """Returns whether a module is the user's."""
    if origin is None or not origin.endswith(".py") or _is_ours(name):
        return False
    path = pathlib.Path(origin).resolve()
    installed = {"site-packages", "dist-packages"} & {*path.parts}
    return not installed and not any(map(path.is_relative_to, _INSTALLED))


# The digests of the modules that this process has loaded, with the `__spec__` by which a reload is
# noticed. A file that was edited after it was loaded is not what runs.
_LOADED: dict[str, tuple[Any, tuple[str, list[str]]]] = {}


def _source(name: str) -> tuple[str, list[str]]:
    """Returns the digest of a module, and the names that it imports."""
    spec = _spec(name)
    before = _LOADED.get(name)
    if before is not None and before[0] is spec and name in sys.modules:
        return before[1]
    origin = spec.origin if spec else sys.modules[name].__file__
    source = pathlib.Path(origin or "").read_text(encoding="utf-8")
    package = (spec.parent if spec else "") or ""
    known = _digest(source), list(_imported(ast.parse(source), package))
    _LOADED[name] = spec, known
    return known


def _digest(source: str) -> str:
    """Returns the digest of a program, without comments, docstrings and layout."""
    tree = ast.parse(textwrap.dedent(source))
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.Pass()
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Yields the absolute names of the modules that a module may import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package or ".")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


@functools.cache
def _library() -> list[str]:
    """Returns the version of jaxdp, and a digest of its source with the launchers."""
    version, source = versions()["library"]
    sha256 = hashlib.sha256(source.encode())
    for path in sorted(pathlib.Path(__file__).parents[1].rglob("*.py")):
        sha256.update(path.read_bytes())
    return [version, sha256.hexdigest()[:16]]
