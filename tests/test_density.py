"""The code is read once: limits on how dense it is. `python tests/density.py` shows the numbers."""

import collections
import itertools

import pytest

from tests import density

# Limits of every folder.
TOKENS_A_LINE = 9.0
NODES_A_STATEMENT = 12.0
FOLDERS = dict(density.folders())
# Public functions whose options do not decide each other, and which a user calls in one line. An
# option is one thing to look up there. Everything else takes eight at most.
MANY_OPTIONS = {
    "jaxdp/data/adapters.py": ["from_folder"],
    "jaxdp/data/tabular.py": ["from_csv"],
    "jaxdp/finetune/adp_clip.py": ["adp_clip"],
    "jaxdp/finetune/evaluate.py": ["charged_accuracy"],
    "jaxdp/finetune/gep.py": ["gep"],
    "jaxdp/finetune/sla_clip.py": ["sla_clip"],
    "jaxdp/labels/stages.py": ["release_labels_in_stages"],
    "jaxdp/models/robustness.py": ["robust_accuracy"],
    "jaxdp/models/training.py": ["fit_public"],
    "jaxdp/prediction/answers.py": ["private_predict", "private_values"],
    "jaxdp/privacy/ledger.py": ["register"],
    "jaxdp/recalibration/recalibrate.py": ["acc_t", "nll_t", "ece_t"],
    "jaxdp/transforms/model_check.py": ["check"],
}


@pytest.fixture(scope="module")
def measured():
    return {name: density.measured(files) for name, files in FOLDERS.items()}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_not_denser_than_its_limit(measured, folder):
    assert measured[folder].tokens_a_line <= TOKENS_A_LINE
    assert measured[folder].nodes_a_statement <= NODES_A_STATEMENT


def test_no_line_is_wide_and_no_file_is_large(measured):
    assert not [place for found in measured.values() for place in found.wide]
    assert not [place for found in measured.values() for place in found.large]


def test_no_function_is_long_and_only_public_ones_have_many_parameters(measured):
    assert not [place for found in measured.values() for place in found.long]
    many = collections.defaultdict(list)
    for place in itertools.chain.from_iterable(found.parameters for found in measured.values()):
        file, _, function = place.split(":")
        many[file].append(function.split(",")[0].strip())
    assert many == MANY_OPTIONS


DENSE = """
def f(a, b, c, d, e, f, g, h, i):
    found = [x + y for x in a for y in b if x if y] if c else {k: v for k, v in zip(d, e)}
    return found
"""


def test_the_measure_sees_dense_code():
    """The twin: what each limit is about."""
    twin = density.Density()
    body = "\n".join(f"    x{k} = {k}" for k in range(70))
    twin.add(
        "twin.py", f"{DENSE}\n\ndef long():\n{body}\n# {'wide ' * 30}\n{'#' * 3}\n" + "\n" * 700
    )
    assert twin.parameters == ["twin.py:2: f, 9 parameters"]
    assert [place.split(":")[2].strip() for place in twin.vague] == ["found"]
    assert len(twin.loops) == len(twin.wide) == len(twin.long) == len(twin.large) == 1
    alone = density.Density()
    alone.add("dense.py", DENSE)
    assert alone.tokens_a_line > TOKENS_A_LINE and alone.nodes_a_statement > NODES_A_STATEMENT


def test_docstrings_do_not_count():
    plain, told = density.Density(), density.Density()
    plain.add("a.py", "def f():\n    return 1\n")
    told.add(
        "a.py", 'def f():\n    """Returns one.\n\n    It is a number.\n    """\n    return 1\n'
    )
    assert (plain.lines, plain.tokens) == (told.lines, told.tokens)
