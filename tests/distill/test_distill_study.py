"""The distillation study of the examples: its parts, a small run, and what its README shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from support.tiny_run import quiet_environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "distillation"
sys.path.insert(0, str(EXAMPLE))

from tiny_study.answers import Epochs, draw, scored  # noqa: E402
from tiny_study.plot import draw_curves  # noqa: E402
from tiny_study.report import BEGIN, END, report, write_readme  # noqa: E402
from tiny_study.settings import FULL  # noqa: E402
from tiny_study.task import draw_prompts, make_model  # noqa: E402

SIZES = [
    "num_seeds=1", "num_steps=50", "mismatch_steps=50", "teacher_steps=200", "sft_steps=120",
    "batch_size=32", "num_prompts=512", "num_measured=256", "num_repeats=1", "hidden_size=32",
    "small_hidden_size=16",
]  # fmt: skip
ARMS = ("sft", "live", "offline", "truncated", "frozen")
STUDENTS = ("realizable", "limited")


pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a run of the whole study with sizes that take seconds."""
    folder = tmp_path_factory.mktemp("study")
    finished = subprocess.run(
        [sys.executable, EXAMPLE / "study.py", "--quick", "--out", folder, *SIZES],
        capture_output=True,
        text=True,
        env=quiet_environment(),
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    assert (folder / "results.md").read_text() == report(found)
    assert (folder / "curves.svg").read_text() == draw_curves(found)
    return found


def runs_of(results: dict[str, Any], **wanted: str) -> list[dict[str, Any]]:
    return [run for run in results["runs"] if all(run[k] == v for k, v in wanted.items())]


def matched(results: dict[str, Any], student: str, arm: str) -> dict[str, Any]:
    (run,) = runs_of(results, student=student, arm=arm, sft_teacher="A", opd_teacher="A")
    return run


def test_what_is_drawn_scores_as_it_was_drawn() -> None:
    model = make_model(0, hidden_size=32, layers=2)
    prompts = draw_prompts(0, num_training=64, num_held_out=1).training
    answers = scored(draw(model, prompts, seed=1), model)
    assert len({len(answer.tokens) for answer in answers}) > 1
    for answer in answers:
        assert answer.log_probs == pytest.approx(answer.teacher_log_probs, abs=1e-4)


def test_every_epoch_has_every_answer_once() -> None:
    epochs = Epochs(list(range(10)), seed=0)
    taken = epochs.take(7) + epochs.take(7) + epochs.take(6)
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10))
    assert taken[:10] != taken[10:]


@pytest.mark.parametrize("wrong", ["steps=3", "num_steps", "num_steps=0", "num_steps=x"])
def test_sizes_that_are_none_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="expected name=number"):
        FULL.changed([wrong])


def test_every_arm_is_run_equally_long_from_one_start(results: dict[str, Any]) -> None:
    for student in STUDENTS:
        curves = [matched(results, student, arm)["curve"] for arm in ARMS]
        assert {tuple(point["step"] for point in curve) for curve in curves} == {(0, 25, 50)}
        assert len({curve[0]["kl"] for curve in curves}) == 1


def test_every_pair_of_teachers_is_run(results: dict[str, Any]) -> None:
    for student in STUDENTS:
        for arm in ("live", "offline"):
            runs = runs_of(results, student=student, arm=arm)
            pairs = {run["sft_teacher"] + run["opd_teacher"] for run in runs}
            assert pairs == {"AA", "AB", "BA", "BB"}


def test_distillation_comes_closer_and_the_frozen_advantage_does_not(
    results: dict[str, Any],
) -> None:
    end = {arm: matched(results, "realizable", arm)["curve"][-1]["kl"] for arm in ARMS}
    start = matched(results, "realizable", "live")["curve"][0]["kl"]
    assert end["live"] < 0.9 * start
    assert end["offline"] < start
    assert end["frozen"] > 2 * start


def test_tokens_are_counted(results: dict[str, Any]) -> None:
    for student in STUDENTS:
        assert matched(results, student, "sft")["tokens_generated"] == 0
        offline, live = (matched(results, student, arm) for arm in ("offline", "live"))
        assert 512 < offline["tokens_generated"] == offline["tokens_scored"] <= 512 * 6
        assert 50 * 32 < live["tokens_generated"] == live["tokens_scored"] <= 50 * 32 * 6


def test_the_commands_end_where_the_arm_in_this_process_ends(results: dict[str, Any]) -> None:
    check = results["cross_check"]
    commands, (repeated,) = check["commands"], check["in_process"]
    start, end = commands["start"]["kl"], commands["end"]["kl"]
    assert end < start
    assert end == pytest.approx(repeated["kl"], abs=0.2 * start)
    assert 512 < commands["tokens_generated"] <= 512 * 6


def test_the_curves_are_an_image_with_a_line_for_each_arm(results: dict[str, Any]) -> None:
    image = ElementTree.fromstring(draw_curves(results))
    lines = image.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == len(STUDENTS) * len(ARMS)


def test_the_readme_shows_what_the_study_wrote() -> None:
    shown = json.loads((EXAMPLE / "results.json").read_text(encoding="utf-8"))
    readme = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    block = readme.partition(BEGIN)[2].partition(END)[0]
    assert block.strip() == report(shown).strip()
    assert (EXAMPLE / "curves.svg").read_text(encoding="utf-8") == draw_curves(shown)


def test_results_replace_what_is_between_the_marks(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_readme(readme, "new\n")
    assert readme.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="expected <!-- study"):
        write_readme(readme, "new\n")
