"""What the cells of launch/colab.ipynb call: installation beside the runtime's jax, its devices,
parts of the report.

Before jaxdp is installed, this needs only the standard library and `packaging`, which every Jupyter
kernel has.
"""

import html
import importlib
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).resolve().parents[1]
NAME = "jaxdp-ledger"  # of the distribution, since jaxdp on PyPI is another project
# jax, its plugins for accelerators with their libraries, and what its compiled parts need.
_RUNTIME = re.compile(r"jax|jaxlib|jax-cuda\d+-.+|libtpu(-.+)?|nvidia-.+|numpy|ml-dtypes")
EXTRAS = (
    "launch",
    "report",
    "bundled",
    "images",
    "corruptions",
    "plots",
)  # of jaxdp, which the notebook uses
_EXTRAS = {"libtpu": "tpu", "jax-cuda13-plugin": "cuda13", "jax-cuda12-plugin": "cuda12"}


# --- Installation -------------------------------------------------------------------------------


def install() -> None:
    """Installs this checkout for the running kernel, unless it is installed. Never changes jax or
    its libraries.

    Raises:
      RuntimeError: The message says what to do. Either jax is too old, or pip found no versions
        that fit the installed jax, and nothing was changed. Or pip replaced something that the
        kernel had loaded.
    """
    before = installed()
    if NAME in before:
        print(f"jaxdp {before[NAME]} is installed, with jax {before['jax']}.")
        return
    check_jax(before)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "constraints.txt")
        path.write_text(constraints(before))
        pip = subprocess.run(command(path), capture_output=True, text=True)
    if pip.returncode:
        raise RuntimeError(
            f"pip could not install jaxdp beside the jax of this runtime:\n{pip.stdout}{pip.stderr}"
        )
    importlib.invalidate_caches()
    after = installed()
    stale = in_use(name for name, version in before.items() if after.get(name) != version)
    if stale:
        raise RuntimeError(
            f"jaxdp is installed, but pip replaced {', '.join(stale)}, which this kernel had "
            "loaded. Choose Runtime > Restart session, then run all cells again."
        )
    print(
        f"Installed jaxdp {after[NAME]}. jax {after['jax']} is "
        + ("unchanged." if "jax" in before else "new.")
    )


def installed() -> dict[str, str]:
    """Returns the versions of all installed distributions by their normalised names."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # Of two distributions with one name, Python imports the first.
            versions.setdefault(_normalised(name), distribution.version)
    return versions


def constraints(versions: Mapping[str, str]) -> str:
    """Returns a file of constraints with which pip fails instead of replacing jax."""
    held = sorted(name for name in versions if _RUNTIME.fullmatch(name))
    return "".join(f"{name}=={versions[name]}\n" for name in held)


def command(constraints: pathlib.Path, *, root: pathlib.Path = ROOT) -> list[str]:
    """Returns the command of pip. It is editable, so that `!python -m launch.finetune` finds the
    configs.
    """
    options = ["--disable-pip-version-check", "--constraint", str(constraints)]
    return [
        sys.executable,
        "-m",
        "pip",
        "install",
        *options,
        "--editable",
        f"{root}[{','.join(EXTRAS)}]",
    ]


def check_jax(versions: Mapping[str, str], *, root: pathlib.Path = ROOT) -> None:
    """Raises RuntimeError if the installed jax, if there is one, is older than jaxdp needs."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    requirements = map(Requirement, project["dependencies"])
    needed = {one.name: one.specifier for one in requirements}["jax"]
    if "jax" not in versions or needed.contains(versions["jax"], prereleases=True):
        return
    extra = next((f"[{extra}]" for plugin, extra in _EXTRAS.items() if plugin in versions), "")
    raise RuntimeError(
        f"This runtime has jax {versions['jax']}, and jaxdp needs jax{needed}. Nothing was "
        "changed. Choose a newer "
        "runtime version (Runtime > Change runtime type). If there is none, replace its jax "
        "yourself: run\n\n"
        f'    %pip install --upgrade "jax{extra}{needed}"\n\n'
        "in a cell of its own, then Runtime > Restart session, and run all cells again."
    )


def in_use(names: Iterable[str]) -> list[str]:
    """Returns the distributions of `names` that have a loaded module."""
    loaded: set[str] = set()
    for module, distributions in importlib.metadata.packages_distributions().items():
        if module in sys.modules:
            loaded |= set(map(_normalised, distributions))
    return sorted(loaded & set(names))


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# --- Devices ------------------------------------------------------------------------------------

_NAMES = {"v5e": "TPU v5e", "h100": "H100"}  # by targets of `jaxdp.compilers`


def expect(devices: Sequence[Any]) -> None:
    """Prints on what the cells compute, and what compilers estimate for larger models on such a
    device.

    Args:
      devices: Those of `jax.devices()`.
    """
    platform, kind = devices[0].platform, devices[0].device_kind
    print(
        f"Found {len(devices)} x {kind}, of the platform {platform}. The cells compute on the "
        "first one."
    )
    if platform == "cpu":
        print(
            "A GPU or TPU is under Runtime > Change runtime type. The cells then compute there, "
            "without a change."
        )
    target = "h100" if platform in ("gpu", "cuda", "rocm") else "v5e"
    rows = estimates(target)
    if rows:
        from jaxdp.compilers import CAVEAT
        from jaxdp.report import format_table

        print(f"\nGradients of a batch on one {_NAMES[target]}. Each number is {CAVEAT}.")
        print(format_table(rows, digits=3))


def estimates(target: str) -> list[dict[str, Any]]:
    """Returns the estimates of plain and of clipped gradients, of the checkout's last report for a
    target.
    """
    from jaxdp.compilers import TARGETS

    path = ROOT / "benchmarks" / "results" / f"compiled_{target}.json"
    if not path.exists():  # of a wheel
        return []
    clock = TARGETS[target].clock or 1.0  # a GPU's report has seconds
    rows = []
    for case, steps in json.loads(path.read_text())["cases"].items():
        if not {"plain", "clipped"} <= steps.keys():
            continue
        plain = 1e3 * steps["plain"].get("total", 0.0) / clock
        clipped = 1e3 * steps["clipped"].get("total", 0.0) / clock
        if plain and clipped:
            row = {"case": case, "plain, ms": plain, "clipped, ms": clipped}
            rows.append(row | {"ratio": clipped / plain})
    return rows


# --- Results ------------------------------------------------------------------------------------


def show(workdir: str | os.PathLike[str], *headings: str) -> None:
    """Displays the sections of a lifecycle's report with these headings, with their figures.

    Raises:
      ValueError: The report has no such heading. The message says which stages are not done.
    """
    from IPython.display import HTML, display

    root = pathlib.Path(workdir)
    page = (root / "report.html").read_text(encoding="utf-8")
    style = re.search(r"<style>(.*?)</style>", page, flags=re.DOTALL)
    assert style is not None
    for heading in headings:
        title = re.escape(html.escape(heading).replace("&#x27;", "&#39;"))  # as Jinja writes it
        section = re.search(
            rf"<(h[23])>{title}</\1>.*?(?=<h2>|<h3>|</section>)", page, flags=re.DOTALL
        )
        if section is None:
            states = json.loads((root / "result.json").read_text())["stages"]
            bad = []
            for name, state in states.items():
                if state["message"]:
                    bad.append(f"{name} {state['status']}, {state['message']}")
            raise ValueError(
                f"The report has no {heading!r}. Stages that are not done: "
                f"{'; '.join(bad) or 'none'}."
            )
        # The style is nested, so that it changes nothing else in the notebook. Its colours belong
        # to the piece.
        nested = f".jaxdp-report {{{style[1].replace(':root', '&')}}}"
        display(HTML(f'<style>{nested}</style><div class="jaxdp-report">{section[0]}</div>'))


def show_images(
    path: str | os.PathLike[str], rows: Mapping[str, Any], *, title: str, most: int = 10
) -> None:
    """Draws the first images of every row under each other (`jaxdp.report.plot_images`) and
    displays the figure.
    """
    from IPython.display import Image, display

    from jaxdp.report import plot_images

    plot_images(path, {name: images[:most] for name, images in rows.items()}, title=title)
    display(Image(filename=str(path), width=760))
