"""No public signature hides its keywords, except for those that only the user can name."""

import importlib
import inspect
import pathlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest

import jaxdp
from jaxdp.audit.finetune import audit_step
from jaxdp.report import plot_curves

# The keywords of these have no fixed names.
OPEN = {
    "jaxdp.data.from_arrays": "the columns of the user's own data",
    "jaxdp.data.Examples.changed": "as dataclasses.replace",
    "jaxdp.files.check_numbers": "the names of the arguments of any function",
    "jaxdp.models.create": "the attributes differ by the name of the model",
    "jaxdp.models.FrozenBatchNorm.param": "as flax.linen.Module.param",
    "jaxdp.release.program": "the arguments of the user's own function",
    "jaxdp.report.MetricsWriter.write": "the metrics of the user's own run",
    "jaxdp.report.WandbWriter": "the arguments of wandb.init, which is an extra",
    "jaxdp.report.render_page": "the variables of the user's own template",
}
REFERENCE = pathlib.Path(__file__).parents[2] / "docs" / "reference"
LIBRARY = pathlib.Path(jaxdp.__file__).parent


def _modules() -> Iterator[Any]:
    """Yields the modules with `__all__`, and those that a page of the reference shows."""
    pages = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    for module in pkgutil.walk_packages([str(LIBRARY)], "jaxdp."):
        path = LIBRARY.parent / module.name.replace(".", "/")
        source = path / "__init__.py" if module.ispkg else path.with_suffix(".py")
        if module.name in shown or "\n__all__ = " in source.read_text():
            yield importlib.import_module(module.name)


def _public(module: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names and functions, classes and methods of a module that jaxdp defines."""
    owner = "jaxdp." if hasattr(module, "__all__") else module.__name__
    for name in getattr(module, "__all__", vars(module)):
        value = getattr(module, name)
        if not (inspect.isfunction(value) or inspect.isclass(value)):
            continue
        if name[0] == "_" or not value.__module__.startswith(owner):
            continue
        yield f"{module.__name__}.{name}", value
        if inspect.isclass(value):
            for method, function in inspect.getmembers(value, inspect.isfunction):
                if method[0] != "_" and function.__module__.startswith("jaxdp."):
                    yield f"{module.__name__}.{name}.{method}", function


def _is_opaque(value: Any) -> bool:
    if getattr(value, "_is_protocol", False):
        return False
    if inspect.isclass(value) and issubclass(value, dict | BaseException):  # of C, without one
        return False
    parameters = inspect.signature(value).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def test_every_public_signature_names_its_keywords():
    hidden: dict[int, str] = {}
    seen = set()
    for module in _modules():
        for name, value in _public(module):
            seen.add(name)
            if _is_opaque(value):
                hidden.setdefault(id(value), name)
    assert len(seen) > 700
    assert {"jaxdp.audit.tta.audit_stream", "jaxdp.tta.serve", "jaxdp.split.adapt"} <= seen
    assert set(hidden.values()) == OPEN.keys()


def test_an_opaque_signature_is_seen():
    def opaque(*, steps: int, **options: Any) -> None:
        """Takes whatever it is given."""

    assert _is_opaque(opaque)


@pytest.mark.parametrize("function, required", [(audit_step, "trials"), (plot_curves, "xlabel")])
def test_a_required_keyword_has_no_default(function, required):
    parameter = inspect.signature(function).parameters[required]
    assert parameter.default is inspect.Parameter.empty
    assert parameter.annotation in (int, str)
