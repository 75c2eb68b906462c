"""The process that compiles the program in a folder, for `jaxdp.compilers.estimate`."""

import json
import pathlib
import sys

from jaxdp.compilers.process import compiled
from jaxdp.compilers.targets import ANSWER

if __name__ == "__main__":
    [folder] = sys.argv[1:]
    answer = compiled(folder)
    pathlib.Path(folder, ANSWER).write_text(json.dumps(answer))
