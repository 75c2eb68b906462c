"""README's Python runs as it stands."""

import re
from pathlib import Path

import jax
import pytest

import jaxdp

README = Path(__file__).resolve().parent.parent / "README.md"


@pytest.mark.usefixtures("quick_compilation")
def test_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 9
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    spent, robust, *described = capsys.readouterr().out.splitlines()
    assert 0 < float(spent) < 8 and 0 <= float(robust) <= 1
    assert described[0] == "private Tent, clip norm 1, noise 1.084 x clip norm"
    assert 9.9 < names["ledger"].epsilon("ward 3") < 10
    assert int(names["served"].state.step) == 1797 // 64
    assert int(names["state"].step) == 50 and int(names["embedded"].step) == 4
    assert (tmp_path / "run" / "checkpoints" / "50").is_dir()
    assert 7.9 < names["ledger"].epsilon("client") <= 8 and names["split_adapted"].backbone.num_classes == 10
    assert 1600 < names["kept"]["count"] < 2000 and not list(tmp_path.rglob("secret_seed"))
    truth = names["source"].gather(range(1700, 1720))["label"]
    assert (names["answers"] == truth).mean() > 0.5
    assert all((box.lower <= box.upper).all() for box in jax.tree.leaves(names["gradients"], is_leaf=_is_interval))


def _is_interval(x):
    return isinstance(x, jaxdp.Interval)
