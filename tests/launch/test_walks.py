"""The way of a config to arrays is short: few functions lie between a launcher and a source, a
config is parsed in one file, and nobody below `launch` sees it."""

import functools
import pathlib
import sys

import pytest
from ml_collections import ConfigDict

from jaxdp.data import DataSpec
from launch import lm
from launch.lifecycle import parts
from tests.launch import tiny
from tests.launch.test_frame import STUDIES as FRAME_STUDIES

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A reader enters at most so many functions, one inside the other, before arrays are there.
MOST_ROOMS = 6
# Other files call functions of launch/data.py in at most so many places.
MOST_RETURNS = 8


@functools.cache  # The profiler asks at each of millions of calls.
def watched(filename):
    """Returns the path below the root of a file in launch/ or jaxdp/data/, None for others."""
    path = pathlib.PurePath(filename)
    if not path.is_relative_to(ROOT):
        return None
    file = path.relative_to(ROOT).as_posix()
    return file if file.startswith(("launch/", "jaxdp/data/")) else None


class Walk:
    """What happens while a study opens its data.

    Attributes:
      rooms: The functions of launch/ and jaxdp/data/ that are entered when a format makes a source.
      returns: The places from which other files of launch/ call functions of launch/data.py.
      strangers: The functions of jaxdp/data/ that got a config.
    """

    def __init__(self, walk):
        self.rooms, self.returns, self.strangers, self._stack = [], set(), set(), []
        sys.setprofile(self._event)
        try:
            walk()
        finally:
            sys.setprofile(None)

    def _event(self, frame, event, _):
        if event == "return" and self._stack and self._stack[-1][0] is frame:
            self._stack.pop()
        code = frame.f_code
        if event != "call" or code.co_name.startswith("<"):
            return
        file = watched(code.co_filename)
        if file is None:
            return
        caller = self._stack[-1][1] if self._stack else ""
        if file == "launch/data.py" and caller not in ("", file):
            self.returns.add((caller, frame.f_back.f_lineno))
        values = frame.f_locals.values()
        if file.startswith("jaxdp/data/") and any(isinstance(x, ConfigDict) for x in values):
            self.strangers.add(code.co_qualname)
        self._stack.append((frame, file, code.co_qualname))
        makes_source = code.co_name.startswith("_open_") and file == "jaxdp/data/spec.py"
        if makes_source and isinstance(frame.f_locals.get("spec"), DataSpec):
            self.rooms = max(self.rooms, [name for _, _, name in self._stack], key=len)


# The cells of a table open its data, each its own.
STUDIES = {name: study for name, study in FRAME_STUDIES.items() if name != "table"}
STUDIES["lm"] = lm.STUDY, tiny.lm


@pytest.mark.parametrize("name", [*STUDIES, "lifecycle"])
def test_the_way_of_a_config_to_arrays_is_short(name, tmp_path):
    if name == "lifecycle":
        config = tiny.lifecycle().data
        walk = Walk(lambda: parts.load(config))
    else:
        study, config = STUDIES[name]
        walk = Walk(lambda: study.open(config(), tmp_path))
    assert len(walk.rooms) <= MOST_ROOMS, walk.rooms
    assert bool(walk.rooms) == (name != "lm"), "texts are no source of a spec"
    assert len(walk.returns) <= MOST_RETURNS, walk.returns
    assert not walk.strangers
