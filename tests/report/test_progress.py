"""Bars of long loops, and the writers of metrics, whose files the libraries' own readers read."""

import struct
import sys

import pytest

from jaxdp.report import TensorBoardWriter, WandbWriter, counting, progress_bar


@pytest.mark.parametrize(
    ("terminal", "setting", "show", "shown"),
    [
        (True, "", True, True),
        (True, "0", True, False),
        (True, "1", False, False),
        (False, "", True, False),
        (False, "1", True, True),
    ],
)
def test_a_bar_is_shown_where_somebody_looks(monkeypatch, terminal, setting, show, shown):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("JAXDP_PROGRESS", setting)
    bar = progress_bar(range(3), label="steps", unit="step", show=show)
    assert bar.disable is not shown and list(bar) == [0, 1, 2]


@pytest.mark.slow
def test_a_bar_has_the_time_that_is_left_and_short_work_has_no_bar(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    list(progress_bar(range(1000), label="quick", unit="step"))
    assert capsys.readouterr().err == ""
    with progress_bar(total=4, initial=1, label="long", unit="step") as bar:
        now[0] += 1.1
        bar.update()
    assert "long:  50%" in (shown := capsys.readouterr().err) and "2/4 [00:01<00:02" in shown
    with counting(lambda x: 2 * x, label="noise", unit="trial") as tried:
        now[0] += 1.1
        assert [tried(x) for x in (1.0, 3.0)] == [2.0, 6.0]
    assert "noise: 2trial" in capsys.readouterr().err


@pytest.mark.slow
def test_tensorboard_reads_the_metrics_and_a_resumed_run_replaces_what_it_repeats(tmp_path):
    pytest.importorskip("tensorboardX", reason="the dependency group test is not installed")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps, factor in (((1, 2, 3), 1.0), ((3, 4), 10.0)):
        with TensorBoardWriter(tmp_path / "board") as writer:
            for step in steps:
                writer(step, {"epsilon": factor * step})
        found = reader.EventAccumulator(str(tmp_path / "board")).Reload().Scalars("epsilon")
    assert [(event.step, event.value) for event in found] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
        (4, 40.0),
    ]


@pytest.mark.slow
def test_wandb_keeps_the_metrics_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="the dependency group test is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with WandbWriter(mode="offline", project="digits", dir=tmp_path) as writer:
        for step in (1, 2):
            writer(step, {"epsilon": 0.5 * step})
    wandb.teardown()  # ends the process that writes the file
    [path] = tmp_path.rglob("*.wandb")
    rows = []
    for message in logged(path.read_bytes()):
        record = wandb.proto.wandb_internal_pb2.Record.FromString(message)
        if record.HasField("history"):
            items = {
                item.key or item.nested_key[0]: item.value_json for item in record.history.item
            }
            rows.append((items["_step"], items["epsilon"]))
    assert rows == [("1", "0.5"), ("2", "1")]


def logged(content):
    """Yields the messages of a log in LevelDB's format: fragments with a checksum, a length and a
    type."""
    message, place = b"", 7
    while place < len(content):
        if -place % 2**15 < 7:  # the rest of a block that holds no fragment
            place += -place % 2**15
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        message += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last fragment
            yield message
            message = b""


@pytest.mark.parametrize(
    ("writer", "extra"), [(TensorBoardWriter, "tensorboard"), (WandbWriter, "wandb")]
)
def test_a_missing_library_is_named_with_its_extra(monkeypatch, tmp_path, writer, extra):
    for module in ("tensorboardX", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"\.\[{extra}\]"):
        writer(**({"folder": tmp_path} if extra == "tensorboard" else {"mode": "offline"}))
