"""The tables of a study, and their place in the README."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tiny_study.arms import ARMS
from tiny_study.models import STUDENTS
from tiny_study.results import Record, Runs, Spread, table
from tiny_study.settings import FULL

BEGIN, END = "<!-- study: begin -->", "<!-- study: end -->"
TRIAL = (
    "**A trial with small sizes: it shows that the study works. Nothing is concluded from its "
    "numbers.**"
)
PHASES = ("prepare", "generate", "score", "train")


def report(results: Record) -> str:
    """Everything that was measured, in Markdown."""
    parts = [_sizes(results)]
    if results["settings"] != FULL.as_dict():
        parts.insert(0, TRIAL)
    for student in STUDENTS:
        parts += [_heading(results, student), _arms(results, student)]
    parts += [
        "### Offline against live\n\nDifference of the reverse KL per answer, one number per seed. "
        "Above 0 the live student is closer to the teacher.",
        _differences(results),
        "### Teachers that differ between SFT and distillation\n\nReverse KL per answer to the "
        f"teacher of the distillation, at the start and after {_early(results)} steps.",
        _mismatch(results),
        "### Costs",
        _costs(results),
        "### The same through the commands",
        _cross_check(results["cross_check"], _early(results)),
    ]
    return "\n\n".join(parts) + "\n"


def write_readme(path: Path, text: str) -> None:
    """Put `text` between the marks of a README.

    Raises:
        ValueError: the marks are not there.
    """
    readme = path.read_text(encoding="utf-8")
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path}: expected {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n{text.rstrip()}\n{END}{after}", encoding="utf-8")


def _early(results: Record) -> int:
    return int(results["settings"]["mismatch_steps"])


def _sizes(results: Record) -> str:
    sizes = results["settings"]
    accuracy = {
        name: Spread(tuple(t["accuracy"] for t in results["teachers"] if t["teacher"] == name))
        for name in ("A", "B")
    }
    return (
        f"{sizes['num_seeds']} seeds; {sizes['num_steps']} optimizer steps of "
        f"{sizes['batch_size']} answers in every arm; {sizes['num_prompts']} training prompts, "
        f"{sizes['num_measured']} held-out ones. The whole took {results['seconds'] / 60:.1f} min "
        f"in {results['num_jobs']} processes of one thread. ± is the deviation over seeds. "
        f"Teachers answer {accuracy['A'].mean:.0%} (A) and {accuracy['B'].mean:.0%} (B) rightly."
    )


def _heading(results: Record, student: str) -> str:
    (size, *_) = {r["parameters"] for r in results["students"] if r["student"] == student}
    (teacher, *_) = {t["parameters"] for t in results["teachers"]}
    return (
        f"### Student {STUDENTS[student]}\n\n{size:,} parameters; the teacher has {teacher:,}. "
        "Reverse KL per answer to the teacher, in nats, on fresh answers to held-out prompts."
    )


def _arms(results: Record, student: str) -> str:
    early, last = _early(results), int(results["settings"]["num_steps"])
    start = Runs(results, student, "live")
    head = ["arm", f"KL, step {early}", f"KL, step {last}", "lowest (step)", "right answers",
            "tokens generated", "tokens scored", *(f"s {phase}" for phase in PHASES)]  # fmt: skip
    first = [
        "SFT (start)",
        start.at(0),
        start.at(0),
        "–",
        f"{start.at(0, 'accuracy').mean:.1%}",
        *["–"] * (len(head) - 5),
    ]
    return table(head, [first, *(_arm(results, student, arm, early, last) for arm in ARMS)])


def _arm(results: Record, student: str, arm: str, early: int, last: int) -> list[object]:
    runs = Runs(results, student, arm)
    lowest = runs.lowest()
    return [
        ARMS[arm].title,
        runs.at(early),
        runs.at(last),
        f"{runs.at(lowest).mean:.3f} ({lowest})",
        f"{runs.at(last, 'accuracy').mean:.1%}",
        f"{runs.total('tokens_generated').mean:,.0f}",
        f"{runs.total('tokens_scored').mean:,.0f}",
        *(f"{runs.seconds([phase]).mean:.1f}" for phase in PHASES),
    ]


def _differences(results: Record) -> str:
    early, last = _early(results), int(results["settings"]["num_steps"])
    rows = []
    for student in STUDENTS:
        live = Runs(results, student, "live")
        for arm in ("offline", "truncated"):
            runs = Runs(results, student, arm)
            gaps = (runs.at(step) - live.at(step) for step in (early, last))
            rows.append([f"{student}: {ARMS[arm].title}", *map(_each, gaps)])
    return table(["student: arm − live OPD", f"step {early}", f"step {last}"], rows)


def _each(spread: Spread) -> str:
    return ", ".join(f"{value:+.3f}" for value in spread.values)


def _mismatch(results: Record) -> str:
    early = _early(results)
    rows = []
    for student in STUDENTS:
        for pair in ("AA", "BB", "AB", "BA"):
            live, offline = (Runs(results, student, arm, pair) for arm in ("live", "offline"))
            teachers = f"SFT {pair[0]}, OPD {pair[1]}"
            kind = "same" if pair[0] == pair[1] else "different"
            rows.append([f"{student}: {teachers} ({kind})", live.at(0), live.at(early),
                         offline.at(early), _each(offline.at(early) - live.at(early))])  # fmt: skip
    return table(["student: teachers", "start", "live", "offline", "offline − live"], rows)


def _costs(results: Record) -> str:
    sizes = results["settings"]
    steps, size = sizes["num_steps"], sizes["batch_size"]
    lines = [
        f"- Live OPD drew {steps * size:,} answers and used each once. Offline OPD drew "
        f"{sizes['num_prompts']:,} and used each {steps * size / sizes['num_prompts']:.1f} times. "
        "SFT, which both need, is in neither."
    ]
    for student in STUDENTS:
        live, offline = (Runs(results, student, arm) for arm in ("live", "offline"))
        each = live.seconds(("generate", "score", "train")).mean / steps
        trained = offline.seconds(["train"]).mean / steps
        prepared = offline.seconds(["prepare"]).mean
        whole = (live.seconds(PHASES).mean, offline.seconds(PHASES).mean)
        lines.append(
            f"- {student}: a live step took {1e3 * each:.0f} ms, an offline step "
            f"{1e3 * trained:.0f} ms, the preparation {prepared:.1f} s. Offline, preparation "
            f"included, is {whole[0] / whole[1]:.2f} times as fast over these {steps} steps; "
            + _break_even(prepared, each - trained)
        )
    return "\n".join(lines)


def _break_even(prepared: float, saved: float) -> str:
    if saved <= 0:
        return "a step saves nothing, so it never breaks even."
    return f"it breaks even at step {math.ceil(prepared / saved)}."


def _cross_check(check: dict[str, Any], step: int) -> str:
    commands, repeats = check["commands"], check["in_process"]
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in commands["seconds"].items())
    rows = [
        ["SFT (start)", _measured(commands["start"]), f"{commands['start']['accuracy']:.1%}"],
        ["`distill prepare`, `train`, `export`", _measured(commands["end"]),
         f"{commands['end']['accuracy']:.1%}"],
        *(
            [f"in process, draws {number}", _measured(point), f"{point['accuracy']:.1%}"]
            for number, point in enumerate(repeats, 1)
        ),
    ]  # fmt: skip
    head = f"realizable student of seed 0, {step} steps of offline OPD, w = 1"
    return (
        table([head, "KL ± standard error", "right answers"], rows)
        + f"\n\nThe commands generated {commands['tokens_generated']:,} tokens and scored "
        f"{commands['tokens_scored']:,}; with starting processes they took: {seconds}."
    )


def _measured(point: Record) -> str:
    return f"{point['kl']:.3f} ± {point['kl_error']:.3f}"
