"""Runs launch/colab.ipynb as Colab does: `python -m tests.launch.notebook` stores the outputs of
its cells in it.

The kernel has an environment of its own, with what the install cell asks for and nothing else.
"""

import getpass
import importlib.metadata
import json
import os
import pathlib
import socket
import tempfile
import tomllib
import venv
from unittest import mock

import nbclient
import nbformat
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jaxdp.version import __version__
from launch import colab

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "launch" / "colab.ipynb"
# `python -m ipykernel_launcher`, which rarely looks for garbage: that takes a third of imports.
KERNEL = """
import gc
gc.set_threshold(100_000, 50, 1000)
import runpy
runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)
"""


def needed(*wanted):
    """Returns the distributions that requirements bring, by the metadata of those that are
    installed."""
    found, left = {}, [Requirement(text) for text in wanted]
    while left:
        asked = left.pop()
        name = canonicalize_name(asked.name)
        if new := {"", *asked.extras} - found.get(name, set()):
            found.setdefault(name, set()).update(new)
            listed = map(Requirement, importlib.metadata.distribution(name).requires or ())
            left += [
                one
                for one in listed
                if not one.marker or any(one.marker.evaluate({"extra": e}) for e in new)
            ]
    return [importlib.metadata.distribution(name) for name in found]


def runtime(folder):
    """Makes an environment with a notebook's kernel and with what the install cell asks for, and
    nothing else.

    The packages are links to those of this environment, so nothing is downloaded. Returns its
    Python."""
    *_, asked = colab.command(folder)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = Requirement(f"jaxdp{asked.removeprefix(str(ROOT))}").extras
    extras = [one for extra in extras for one in project["optional-dependencies"][extra]]
    venv.create(folder, with_pip=False)
    [site] = folder.glob("lib/python*/site-packages")
    for distribution in needed("ipykernel", *project["dependencies"], *extras):
        for file in distribution.files:
            place, parts = pathlib.Path(distribution.locate_file("")), file.parts
            # Several distributions share a folder that is no module, such as google.
            alone = (place / parts[0] / "__init__.py").exists() or parts[0].endswith(
                (".dist-info", ".libs")
            )
            parts = parts[: 1 if alone else 2]
            link = site.joinpath(*parts)
            if parts[0] not in ("..", "__pycache__") and not link.exists():
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(place.joinpath(*parts))
    (site / "jaxdp_ledger.dist-info").mkdir()
    (site / "jaxdp_ledger.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {colab.NAME}\nVersion: {__version__}\n"
    )
    return folder / "bin" / "python"


def executed(folder):
    """Executes the notebook below a folder, on CPU. Returns it with its outputs."""
    (folder / "jaxdp").symlink_to(ROOT)  # cloned already
    kernel = folder / "share" / "kernels" / "colab"
    kernel.mkdir(parents=True)
    command = [str(runtime(folder / "runtime")), "-c", KERNEL, "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "", "language": "python"})
    )
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    options = {"kernel_name": "colab", "resources": {"metadata": {"path": str(folder)}}}
    client = nbclient.NotebookClient(notebook, timeout=900, **options)
    flags = os.environ.get("XLA_FLAGS", "").split()
    one = " ".join(f for f in flags if "device_count" not in f)  # one device, as on most runtimes
    given = {"JUPYTER_PATH": str(folder / "share"), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": one}
    with mock.patch.dict(os.environ, given):
        os.environ.pop("PYTHONPATH", None)
        client.execute()
    return notebook


def stored(notebook, folder):
    """Returns the text of the notebook as it is kept: without progress bars, and without names of
    this machine."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = merged(cell.outputs)
    notebook.metadata = nbformat.read(NOTEBOOK, as_version=4).metadata
    machine = f"{getpass.getuser().ljust(3)}  {socket.gethostname().ljust(4)}"
    text = nbformat.writes(notebook).replace(machine, "root  host")
    for path, name in ((str(folder), "/content"), (str(ROOT), "/content/jaxdp")):
        text = text.replace(path, name)
    return text + "\n"


def merged(outputs):
    """Returns the outputs of a cell with its lines in one output, without those on stderr."""
    found = []
    for output in outputs:
        if output.output_type == "stream" and found and found[-1].output_type == "stream":
            found[-1].text += output.text if output.name == "stdout" else ""
        elif output.get("name") != "stderr":
            found.append(output)
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        text = stored(executed(pathlib.Path(name)), name)
    NOTEBOOK.write_text(text)
