"""Checks the pages in a browser with axe, and writes what it found: `python -m tests.accessibility
--output FILE`.

It makes the reports of a lifecycle and of one fine-tuning run, and the page of a ledger. Headless
Chromium opens each
from the disk, on a wide screen and on a phone, in light, dark and print. axe must find no violation, nothing may be
requested or wider than the screen, and broken twins must be found. `make accessibility` installs
what it needs. `--screenshots docs/pages` also takes the pictures of the documentation."""  # noqa: E501

import argparse
import contextlib
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from jaxdp.report import format_table, write_ledger_page

ROOT = pathlib.Path(__file__).resolve().parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# The width of the screen in pixels, its colours, and its medium.
VIEWS = {
    "1280 px": (1280, "light", "screen"),
    "390 px": (390, "light", "screen"),
    "1280 px, dark": (1280, "dark", "screen"),
    "390 px, dark": (390, "dark", "screen"),
    "print": (1280, "light", "print"),
}
HEAD = """# Accessibility of the pages

`make accessibility` writes this page. It runs the demo and one fine-tuning run. Headless Chromium opens their reports
and the page of the demo's ledger from the disk, and [axe](https://github.com/dequelabs/axe-core) checks them. A problem
is a violation that axe found, a request to anything but the page, or something wider than the screen. axe leaves to
people whether figures of one character have enough contrast: rules of this kind are "not decided". Broken twins are
pages that the check must refuse.
"""  # noqa: E501
# What breaks a page, and the rule of axe, or the problem, that finds it.
TWINS = {
    "a figure without an alternative text": (
        r'(<svg class="(?:chart|bar)" role="img") aria-label="[^"]*"',
        r"\1",
        "svg-img-alt",
    ),
    "pale text": (r"--ink: #222;", "--ink: #aaa;", "color-contrast"),
    "a table without headings": (
        r"<th role=\"columnheader\" scope=\"col\">[^<]*</th>",
        "",
        "aria-required-children",
    ),
    "no language": (r'<html lang="en">', "<html>", "html-has-lang"),
    "a picture from elsewhere": (
        r"</main>",
        '<img alt="x" src="elsewhere.png"></main>',
        "requests",
    ),
    "a wide picture": (
        r"</main>",
        '<svg width="2000" aria-hidden="true"></svg></main>',
        "wider than the screen",
    ),
}


def problems(
    browser: Browser, page: pathlib.Path, width: int, colours: Any, medium: Any
) -> tuple[list[str], dict[str, Any]]:
    """Returns what is wrong with a page in a view, and the answer of axe."""
    with contextlib.closing(
        browser.new_context(viewport={"width": width, "height": 900}, color_scheme=colours)
    ) as context:
        tab, requests = context.new_page(), []
        tab.emulate_media(media=medium, color_scheme=colours)
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(page.as_uri())
        # The tables behind the figures are checked as well.
        tab.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
        found = [f"requests {url}" for url in requests if url != page.as_uri()]
        wide = tab.evaluate("document.documentElement.scrollWidth")
        found += [f"is wider than the screen: {wide} px of {width}"] if wide > width else []
        answer = Axe().run(tab).response
        for violation in answer["violations"]:
            targets = ", ".join(" ".join(node["target"]) for node in violation["nodes"][:3])
            found.append(
                f"{violation['id']} at {len(violation['nodes'])} place(s), such as {targets}"
            )
        return found, answer


def twins(browser: Browser, page: pathlib.Path) -> Iterator[dict[str, str]]:
    """Yields a row for each broken twin of a page, with what was found. Raises AssertionError if
    nothing was."""
    text = page.read_text()
    # The policy of the page would refuse another style and the picture.
    text = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    for name, (pattern, replacement, rule) in TWINS.items():
        broken, count = re.subn(pattern, replacement, text)
        assert count, f"the page has nothing that matches {pattern}."
        path = page.with_name("twin.html")
        path.write_text(broken)
        found, _ = problems(browser, path, *VIEWS["390 px"])
        assert any(rule in line for line in found), f"the twin {name!r} was not found: {found}."
        yield {"broken twin": name, "found as": rule}


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Yields a headless browser, the first of `BROWSERS` on PATH."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is on PATH. Install one.")
    with (
        sync_playwright() as play,
        contextlib.closing(
            play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        ) as browser,
    ):
        yield browser


def make_pages(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Runs the demo and one fine-tuning run, and returns the page of each and of the demo's ledger,
    by name."""
    run(
        "lifecycle",
        "--config",
        "configs/lifecycle_digits.py",
        "--workdir",
        str(folder / "lifecycle"),
    )
    run("finetune", "--config", "configs/digits_dpsgd.py", "--workdir", str(folder / "finetune"))
    pages = {name: folder / name / "report.html" for name in ("lifecycle", "finetune")} | {
        "ledger": folder / "ledger.html"
    }
    with contextlib.chdir(folder):  # the page shows the path as it is given
        write_ledger_page("lifecycle/ledger.sqlite", pages["ledger"])
    return pages


def run(launcher: str, *arguments: str) -> None:
    """Runs a launcher. Its pages are published, so they name a made-up user and machine."""
    program = "import runpy, socket; socket.gethostname = lambda: 'workstation'; "
    program += f"runpy.run_module('launch.{launcher}', run_name='__main__', alter_sys=True)"
    environment = os.environ | {"LOGNAME": "ada"}
    subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, env=environment, check=True
    )


def photograph(browser: Browser, pages: dict[str, pathlib.Path], folder: pathlib.Path) -> None:
    """Writes the upper part of each page as PNG files, in both widths, and of the lifecycle in
    dark."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in pages.items():
        for view in ("1280 px", "390 px", *(["1280 px, dark"] if name == "lifecycle" else [])):
            width, colours, _ = VIEWS[view]
            path = folder / f"{name}_{width}{'_dark' if colours == 'dark' else ''}.png"
            with contextlib.closing(
                browser.new_context(viewport={"width": width, "height": 1700}, color_scheme=colours)
            ) as context:
                tab = context.new_page()
                tab.goto(page.as_uri())
                tab.screenshot(path=path)
            with Image.open(path) as image:
                image.convert("RGB").quantize(128).save(path, optimize=True)


def main() -> int:
    """Checks the pages and writes the results. Returns 1 if there is a problem."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=pathlib.Path, required=True, help="the page of the results"
    )
    parser.add_argument(
        "--screenshots", type=pathlib.Path, help="a folder for pictures of the pages"
    )
    given = parser.parse_args()
    rows, wrong = [], []
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        pages = make_pages(pathlib.Path(folder))
        for name, page in pages.items():
            for view, terms in VIEWS.items():
                found, answer = problems(browser, page, *terms)
                row = {
                    "rules passed": len(answer["passes"]),
                    "not decided": len(answer["incomplete"]),
                }
                rows.append({"page": name, "view": view, **row, "problems": len(found)})
                wrong += [f"{name}, {view}: {line}" for line in found]
        broken = list(twins(browser, pages["ledger"]))
        if given.screenshots:
            photograph(browser, pages, given.screenshots)
        versions = {
            "axe-core": answer["testEngine"]["version"],
            "Chromium": browser.version,
            "Python": platform.python_version(),
        }
    versions |= {
        name: importlib.metadata.version(name) for name in ("playwright", "axe-playwright-python")
    }
    parts = [
        HEAD.strip(),
        format_table(
            [{"program": name, "version": version} for name, version in versions.items()],
            style="markdown",
        ),
    ]
    parts += [
        "## Pages",
        format_table(rows, style="markdown"),
        *(["\n".join(f"- {line}" for line in wrong)] if wrong else []),
    ]
    parts += ["## Broken twins", format_table(broken, style="markdown")]
    text = "\n\n".join(parts) + "\n"
    print(text)
    given.output.write_text(text)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
