"""A value of another kind than the configs have is refused by its field, before data is read."""

import copy
import json

import pytest
from ml_collections import ConfigDict

from launch import adapt, catalogue, dpadapter, frame, lm, predict, recalibrate, settings, split
from tests.launch import tiny

WRONG = (None, "zz", -3, [-3], ["zz"])
# Launchers whose bundled configs have all kinds of fields.
NAMES = ("digits_dpsgd", "tta/digits", "lm/bytes", "split/digits")


def paths(fields, before=()):
    for name, value in fields.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from paths(value, (*before, name))


def changed(fields, path, value):
    fields = copy.deepcopy(fields)
    *parts, last = path
    part = fields
    for name in parts:
        part = part[name]
    before, part[last] = part[last], value
    return ConfigDict(fields), before


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_field_refuses_values_of_other_kinds(name):
    fields = json.loads(catalogue.load(name).to_json())  # which has no references between fields
    settings.check_values(ConfigDict(fields))
    for path in paths(fields):
        *_, parent, last = ("", *path)
        for value in WRONG:
            config, before = changed(fields, path, value)
            is_kept = isinstance(value, type(before)) or {type(value), type(before)} == {
                list,
                tuple,
            }
            is_number = isinstance(value, int) and isinstance(before, float)
            is_nothing = value is None and last in settings._OPTIONAL
            if is_kept or is_number or is_nothing or parent == "parts" or last == "preprocessing":
                continue
            with pytest.raises(ValueError, match=rf"config\.{'.'.join(path)} must .*, got "):
                settings.check_values(config)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("private.steps", None, r"a number, such as \d+, got None. Change it with"),
        ("private.steps", [200], r"a number, such as \d+, got \[200\]"),
        ("private.exact", "False", "True or False, such as False, got 'False'"),
        (
            "private.method_options",
            None,
            r"a part with fields of its own, such as {adp_alloc, .*}, got None",
        ),
        ("model.options.widths", ["zz"], r"a list, such as \(.*\), got \['zz'\]"),
        ("data.adjacency", 3, "a text, such as 'add_remove', got 3"),
        ("private.optimizer_options.adam.b1", -3.0, r"in \[0, 1\), got -3.0"),
    ],
)
def test_the_message_has_a_value_that_the_field_may_have(field, value, words):
    fields = catalogue.load("digits_dpsgd").to_dict()
    config, _ = changed(fields, field.split("."), value)
    with pytest.raises(ValueError, match=rf"^config\.{field} must be {words}"):
        settings.check_values(config)


def test_what_says_that_there_is_nothing_passes():
    fields = catalogue.load("predict/csv").to_dict()
    settings.check_values(changed(fields, ["data", "features"], ())[0])
    fields = catalogue.load("digits_dpsgd").to_dict()
    settings.check_values(changed(fields, ["private", "exact"], 0)[0])
    settings.check_values(changed(fields, ["watch"], None)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "make", "field", "value", "words"),
    [
        (lm.STUDY, tiny.lm, "data.parts.private", None, "must be a share of the bundled texts"),
        (lm.STUDY, tiny.lm, "model.preprocessing", [3], "must have the fields size, mean and std"),
        (adapt.STUDY, tiny.adapt, "data.parts.public", None, "must name a part of the data"),
        (adapt.STUDY, tiny.adapt, "data.corruptions", ["zz"], "must be one of .*, got 'zz'"),
        (adapt.STUDY, tiny.adapt, "protocol.order", "zz", "must be .*, got 'zz'"),
        (adapt.STUDY, tiny.adapt, "tuning.learning_rates", [], "must have at least one entry"),
        (predict.STUDY, tiny.predict, "data.parts.private", None, "must name a part of the data"),
        (
            recalibrate.STUDY,
            tiny.recalibrate,
            "train.optimizer",
            "zz",
            "must be an optimizer of optax",
        ),
        (split.STUDY, tiny.split, "client.laplace_unit", "zz", "must be 'std' or 'representation'"),
        (dpadapter.STUDY, tiny.dpadapter, "grids.small.comparisons", "zz", "must be a list"),
        (
            dpadapter.STUDY,
            tiny.dpadapter,
            "methods.GEP.method",
            "zz",
            "has 'zz', which is not one of",
        ),
        (
            dpadapter.STUDY,
            tiny.dpadapter,
            "grids.small.epsilons",
            [],
            "must have at least one entry",
        ),
    ],
)
def test_a_study_refuses_it_before_anything_is_computed(study, make, field, value, words, tmp_path):
    """Each of these was an error of Python, or was noticed in the middle of a run, or never."""
    config, _ = changed(make().to_dict(), field.split("."), value)
    with pytest.raises(ValueError, match=rf"^config\.{field} {words}"):
        frame.run(study, config, tmp_path)
    assert not list(tmp_path.iterdir())
