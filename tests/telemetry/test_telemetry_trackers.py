"""Trackers: they get the figures, they keep them where they should, and they never stop a run."""

from __future__ import annotations

import json
import logging
import math
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.config.run import TelemetryConfig, WandbConfig
from rollmill.errors import ConfigError
from rollmill.telemetry.prometheus import PrometheusEndpoint, exposition
from rollmill.telemetry.trackers import Trackers, open_trackers


class Notebook:
    """Writes down what it is told."""

    name = "the notebook"

    def __init__(self) -> None:
        self.records: list[tuple[str, int, dict[str, float]]] = []
        self.is_closed = False

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        self.records.append((kind, step, dict(metrics)))

    def forget_after(self, step: int) -> None:
        self.records = [record for record in self.records if record[1] <= step]

    def close(self) -> None:
        self.is_closed = True


class FullDisk(Notebook):
    """Fails as a full disk does."""

    name = "the full disk"

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        super().write(kind, step, metrics)
        raise OSError(28, "No space left on device")


def get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=5) as answer:
        return answer.read().decode()


def test_every_tracker_gets_every_record_and_is_closed_at_the_end() -> None:
    one, two = Notebook(), Notebook()
    with Trackers([one, two]) as trackers:
        trackers.write("train", 1, {"reward/mean": 0.5})
        trackers.write("eval", 1, {"eval/x/reward": 0.25})
    expected = [("train", 1, {"reward/mean": 0.5}), ("eval", 1, {"eval/x/reward": 0.25})]
    assert one.records == two.records == expected
    assert one.is_closed
    assert two.is_closed


def test_a_tracker_that_fails_costs_one_warning_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, good = FullDisk(), Notebook()
    with caplog.at_level(logging.WARNING), Trackers([broken, good]) as trackers:
        for step in (1, 2, 3):
            trackers.write("train", step, {"reward/mean": 0.5})
    assert len(broken.records) == 1
    assert len(good.records) == 3
    (record,) = caplog.records
    assert "the full disk" in record.message
    assert "No space left" in record.message


def test_by_default_nothing_is_opened_and_no_package_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rollmill.config.run import TelemetryConfig\n"
        "from rollmill.telemetry.trackers import open_trackers\n"
        f"open_trackers(TelemetryConfig(), Path({str(tmp_path)!r})).close()\n"
        "print([m for m in ('wandb', 'tensorboard', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        ("tensorboard.summary", TelemetryConfig(tensorboard=True)),
        ("wandb", TelemetryConfig(wandb=WandbConfig(mode="offline"))),
    ],
)
def test_a_missing_package_says_what_to_install(
    module: str, settings: TelemetryConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        open_trackers(settings, tmp_path)
    assert f"rollmill[{module.partition('.')[0]}]" in str(caught.value.fix)


def test_what_was_opened_is_closed_when_a_later_tracker_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_trackers(TelemetryConfig(prometheus_port=0), tmp_path) as first:
        (endpoint,) = first._trackers
        assert isinstance(endpoint, PrometheusEndpoint)
        port = int(endpoint.address.rsplit(":", 1)[1].partition("/")[0])
    monkeypatch.setitem(sys.modules, "wandb", None)
    settings = TelemetryConfig(prometheus_port=port, wandb=WandbConfig(mode="offline"))
    with pytest.raises(ConfigError, match="not installed"):
        open_trackers(settings, tmp_path)
    with open_trackers(TelemetryConfig(prometheus_port=port), tmp_path):
        pass  # the port is free again


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    with open_trackers(TelemetryConfig(tensorboard=True), tmp_path) as trackers:
        trackers.write("train", 1, {"reward/mean": 0.25, "train/loss/total": math.nan})
        trackers.write("train", 2, {"reward/mean": 0.5})
    (file,) = (tmp_path / "tensorboard").iterdir()
    found = [
        (event.step, value.tag, value.tensor.float_val[0])
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    ]
    assert found == [(1, "reward/mean", 0.25), (2, "reward/mean", 0.5)]


def test_wandb_offline_keeps_the_figures_in_the_run_folder(tmp_path: Path) -> None:
    """In a process of its own: the package starts helpers that live as long as the process."""
    code = (
        "import sys; from pathlib import Path\n"
        "from rollmill.config.run import TelemetryConfig, WandbConfig\n"
        "from rollmill.telemetry.trackers import open_trackers\n"
        "wandb = WandbConfig(mode='offline', project='mill', tags=('a',))\n"
        "with open_trackers(TelemetryConfig(wandb=wandb), Path(sys.argv[1]), {'seed': 7}) as t:\n"
        "    t.write('train', 1, {'reward/mean': 0.25, 'bad': float('nan')})\n"
        "    t.write('eval', 1, {'eval/x/reward': 0.75})\n"
        "assert not t._trackers\n"
    )
    run_dir = tmp_path / "run"
    subprocess.run([sys.executable, "-c", code, str(run_dir)], check=True, timeout=90)
    (folder,) = (run_dir / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    assert json.loads((run_dir / "wandb_run.json").read_text())["id"] in file.name
    assert _wandb_history(file) == [
        {"reward/mean": 0.25, "step": 1},
        {"eval/x/reward": 0.75, "step": 1},
    ]


def _wandb_history(path: Path, *, hidden: bool = False) -> list[dict[str, float]]:
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in _wandb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            rows.append({name: value for name, value in row.items() if hidden or name[0] != "_"})
    return rows


def _wandb_records(data: bytes) -> Iterator[bytes]:
    """A LevelDB log: blocks of 32 KiB, records of checksum, length, type and payload."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def test_wandb_is_told_every_step_once_however_often_the_run_resumes(tmp_path: Path) -> None:
    """Four lives of a run: 1 to 3; resumed after 2; resumed after 2 again; begun anew."""
    code = (
        "import sys; from pathlib import Path\n"
        "from rollmill.config.run import TelemetryConfig, WandbConfig\n"
        "from rollmill.telemetry.trackers import open_trackers\n"
        "lives = [(-1, (1, 2, 3)), (2, (3, 4)), (2, (3, 4, 5)), (-1, (1,))]\n"
        "for after, steps in lives:\n"
        "    wandb = TelemetryConfig(wandb=WandbConfig(mode='offline'))\n"
        "    with open_trackers(wandb, Path(sys.argv[1])) as t:\n"
        "        t.forget_after(after)\n"
        "        for step in steps:\n"
        "            t.write('train', step, {'x': step})\n"
        "        t.write('eval', steps[-1], {'y': steps[-1]})\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=200)
    told: dict[str, list[tuple[int, int]]] = {}
    for file in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb")):
        rows = _wandb_history(file, hidden=True)
        told.setdefault(file.stem.removeprefix("run-"), []).extend(
            (int(row["_step"]), int(row["step"])) for row in rows
        )
    resumed, anew = sorted(told.values(), key=len, reverse=True)
    assert [step for _, step in resumed] == [1, 2, 3, 3, 4, 4, 5, 5], "each step, and its eval"
    assert [number for number, _ in resumed] == list(range(8)), "numbered on, never anew"
    assert anew == [(0, 1), (1, 1)]


def test_tensorboard_shows_every_step_once_after_resumes(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    def live(after: int, steps: range, offset: float) -> None:
        with open_trackers(TelemetryConfig(tensorboard=True), tmp_path) as trackers:
            trackers.forget_after(after)
            for step in steps:
                trackers.write("train", step, {"x": step + offset})

    def shown() -> list[tuple[int, float]]:
        found = EventAccumulator(str(tmp_path / "tensorboard"))
        found.Reload()
        return [(e.step, float(e.tensor_proto.float_val[0])) for e in found.Tensors("x")]

    live(-1, range(1, 5), 0.0)
    live(2, range(3, 7), 0.5)
    assert shown() == [(1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5), (5, 5.5), (6, 6.5)]
    live(-1, range(1, 3), 0.25)
    assert shown() == [(1, 1.25), (2, 2.25)], "begun anew: nothing of the old run is left"


def test_prometheus_serves_the_newest_figures(tmp_path: Path) -> None:
    with open_trackers(TelemetryConfig(prometheus_port=0), tmp_path / "my run") as trackers:
        (endpoint,) = trackers._trackers
        assert isinstance(endpoint, PrometheusEndpoint)
        assert get(endpoint.address) == ""
        trackers.write("train", 1, {"reward/mean": 0.25, "train/policy/old_kl": math.inf})
        trackers.write("train", 2, {"reward/mean": 0.5})
        trackers.write("eval", 2, {"eval/a-b/pass@1": 1.0})
        assert get(endpoint.address).splitlines() == [
            "# TYPE rollmill_step gauge",
            'rollmill_step{run="my run",kind="eval"} 2',
            'rollmill_step{run="my run",kind="train"} 2',
            "# TYPE rollmill_eval_a_b_pass_1 gauge",
            'rollmill_eval_a_b_pass_1{run="my run"} 1.0',
            "# TYPE rollmill_reward_mean gauge",
            'rollmill_reward_mean{run="my run"} 0.5',
            "# TYPE rollmill_train_policy_old_kl gauge",
            'rollmill_train_policy_old_kl{run="my run"} +Inf',
        ]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(endpoint.address.replace("/metrics", "/"))
    with pytest.raises(urllib.error.URLError):
        get(endpoint.address)


def test_a_port_in_use_is_an_error_before_the_run(tmp_path: Path) -> None:
    with open_trackers(TelemetryConfig(prometheus_port=0), tmp_path) as trackers:
        (endpoint,) = trackers._trackers
        assert isinstance(endpoint, PrometheusEndpoint)
        port = int(endpoint.address.rsplit(":", 1)[1].partition("/")[0])
        with pytest.raises(ConfigError, match="cannot listen"):
            open_trackers(TelemetryConfig(prometheus_port=port), tmp_path)


@given(
    run=st.text(),
    figures=st.dictionaries(st.text(min_size=1), st.floats(), max_size=8),
)
def test_the_exposition_is_always_well_formed(run: str, figures: dict[str, float]) -> None:
    lines = exposition(run, {"train": 3}, figures).split("\n")
    assert lines.pop() == ""
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    for line in lines:
        if not line.startswith("#"):
            name, _, rest = line.partition('{run="')
            assert name in names
            float(rest.rpartition(" ")[2].replace("Inf", "inf"))
