"""Specs: each makes its source, errors name the field, and parts share no record."""

import sys
import types

import numpy as np
import pytest
from ml_collections import ConfigDict

import jaxdp.data
from jaxdp.data import DataSpec, bundled, from_arrays
from jaxdp.data import spec as specs
from jaxdp.data.apart import check_records_apart
from launch import data


def digits(**fields):
    known = {"source": "bundled", "name": "digits", "split_seed": 3}
    return ConfigDict({**known, "parts": {"private": 0.5, "sources": (100, 200)}, **fields})


def test_rows_of_a_bundled_set_are_the_split_of_its_seed():
    """Broken twin: rows that start where the rounded sizes, not the rounded ends, add up to."""
    found = data.parts(digits(), "sources", "private")
    assert list(found) == ["sources 0", "sources 1", "private"]
    shares = (0.5, 100 / 1797, 200 / 1797)
    expected = bundled("digits").split(shares, seed=3)  # in the order of launch.data.ROLES
    for name, part in zip(("private", "sources 0", "sources 1"), expected, strict=True):
        assert found[name].name == f"digits/{name}"
        assert found[name].fingerprint == part.fingerprint
    assert len(jaxdp.data.open(DataSpec(source="bundled", name="blobs"))) == 1000


def test_a_spec_says_unit_and_adjacency_and_its_field():
    spec = data.specs(digits(adjacency="replace_one"), "sources", unit="scan")["sources 1"]
    assert spec.terms == {"unit": "scan", "adjacency": "replace_one"}
    assert (spec.field, spec.title) == ("config.data.parts.sources 1", "digits/sources 1")
    assert hash(spec.rows) and spec.rows[1] - spec.rows[0] == 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": "cloud"}, r"config\.data\.source must be 'bundled', .*, got 'cloud'"),
        ({"name": "letters"}, r"config\.data\.name must be one of 'digits', .* got 'letters'"),
        ({"parts": {}}, r"config\.data\.parts must name a part of 'digits', got none"),
        ({"parts": {"private": 1.5}}, r"config\.data\.parts\.private must be a share in \(0, 1\)"),
        ({"parts": {"private": 1798}}, r"config\.data\.parts must add up to at most 1797 records"),
        ({"source": "tfds", "parts": {"test": 3}}, r"parts\.test must be a split such as"),
        ({"source": "folder", "parts": {"test": 3}}, r"parts\.test must be a text .* got 3"),
    ],
)
def test_a_mistake_names_the_field_of_the_config(fields, message):
    with pytest.raises(ValueError, match=message):
        data.specs(digits(**fields), "private")


def test_a_part_of_no_records_is_refused():
    with pytest.raises(ValueError, match=r"data\.parts\.test must have at least one record"):
        data.parts(digits(parts={"private": 0.25, "test": 1e-5}), "private", "test")


def test_a_whole_set_keeps_some_classes_and_names_its_field():
    config = ConfigDict({"source": "bundled", "name": "digits", "classes": (3, 1)})
    found = jaxdp.data.open(data.whole(config))
    labels = bundled("digits").arrays["label"]
    assert found.num_classes == 2 and len(found) == np.isin(labels, (1, 3)).sum()
    config.name = "letters"
    with pytest.raises(ValueError, match=r"config\.data\.client\.name must be one of 'digits'"):
        jaxdp.data.open(data.whole(config, "config.data.client"))


def test_a_format_is_one_function_and_one_row(monkeypatch):
    def memory(spec, prepare):
        return from_arrays(x=np.arange(spec.options["count"]), name=spec.title)

    monkeypatch.setattr(specs, "FORMATS", {**specs.FORMATS, "memory": memory})
    config = digits(source="memory", options={"count": 7}, parts={"private": "a", "test": "b"})
    found = data.parts(config, "private", "test")
    assert {name: len(source) for name, source in found.items()} == {"private": 7, "test": 7}
    assert found["test"].name == "digits/b"


def test_only_a_spec_that_says_so_is_prepared(monkeypatch):
    module = types.ModuleType("clinic")
    module.read = lambda part: from_arrays(x=np.zeros(3), name=part)
    monkeypatch.setitem(sys.modules, "clinic", module)
    seen = []
    read = specs.format_of("clinic:read")
    monkeypatch.setattr(
        specs,
        "_open_function",
        lambda spec, prepare: seen.append(prepare) or read(spec, prepare),
    )
    for wanted in (False, True):
        spec = DataSpec(source="clinic:read", name="scans", part="a", prepare=wanted)
        assert jaxdp.data.open(spec, prepare=len).name == "scans/a"
    assert seen == [None, len]


@pytest.mark.parametrize("source", ["csv", "npz", "folder"])
@pytest.mark.parametrize("other", ["./a.{0}", "../files/a.{0}", "link.{0}"])
def test_one_file_under_two_names_is_no_two_parts(source, other, tmp_path):
    """An account counts one part, and a test part has none."""
    folder, ending = tmp_path / "files", "npz" if source == "npz" else "csv"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.{ending}").write_text("path,label\n" + f"{name}.png,0\n")
    (folder / f"link.{ending}").symlink_to(folder / f"a.{ending}")

    def check(*parts):
        of_roles = {}
        for role, part in zip(("private", "test"), parts, strict=True):
            part = part.format(ending)
            of_roles[role] = DataSpec(source=source, role=role, part=part, path=str(folder))
        check_records_apart(of_roles)

    check("a.{0}", "b.{0}")
    with pytest.raises(ValueError, match="for several roles, which would share all records"):
        check("a.{0}", other)
