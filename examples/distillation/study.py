"""Distillation between tiny models: does rollmill's implementation behave as the theory says?

    python examples/distillation/study.py             the whole study, minutes on two cores
    python examples/distillation/study.py --quick     the same in small: shows that it works

Writes `results.json`, `results.md` and `curves.svg` into the folder of `--out`; with
`--write-readme` also into the README's folder, the tables into the README itself. `name=number`
arguments change the sizes (`tiny_study/settings.py`). The README says what it shows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS, CURVES = "results.json", "curves.svg"
sys.path.insert(0, str(HERE))

from tiny_study.cross_check import repeat_in_process, run_commands  # noqa: E402
from tiny_study.models import STUDENTS, TEACHERS, Place, train_student, train_teacher  # noqa: E402
from tiny_study.pairs import run_student  # noqa: E402
from tiny_study.plot import draw_curves  # noqa: E402
from tiny_study.report import report, write_readme  # noqa: E402
from tiny_study.settings import FULL, QUICK, Settings  # noqa: E402


def main() -> None:
    """Run everything, then write everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--out", type=Path, default=Path("runs/distillation/study"))
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--write-readme", action="store_true", help="results into README.md")
    parser.add_argument("--report-only", action="store_true", help="from the results in --out")
    parser.add_argument("sizes", nargs="*", metavar="name=number")
    arguments = parser.parse_args()
    try:
        settings = (QUICK if arguments.quick else FULL).changed(arguments.sizes)
    except ValueError as error:
        parser.error(str(error))
    folder = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.report_only:
        results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    else:
        results = run_study(settings, folder / "models", num_jobs=arguments.jobs)
    text = report(results)
    (folder / "results.md").write_text(text, encoding="utf-8")
    write_data(folder, results)
    if arguments.write_readme:
        write_readme(HERE / "README.md", text)
        write_data(HERE, results)
    print(text)


def write_data(folder: Path, results: dict[str, Any]) -> None:
    """The numbers and the curves, as files."""
    (folder / RESULTS).write_text(json.dumps(results) + "\n", encoding="utf-8")
    (folder / CURVES).write_text(draw_curves(results), encoding="utf-8")


def run_study(settings: Settings, folder: Path, *, num_jobs: int) -> dict[str, Any]:
    """All of it; what `results.json` holds.

    Args:
        settings: the sizes.
        folder: for models and for the commands' run.
        num_jobs: processes that work side by side, each with one thread.
    """
    started = time.perf_counter()
    places = [Place(folder.resolve(), seed, settings) for seed in range(settings.num_seeds)]
    workers = ProcessPoolExecutor(
        num_jobs, mp_context=get_context("spawn"), initializer=_begin_worker
    )
    with workers:
        teachers = _gather(
            [workers.submit(train_teacher, p, name) for p in places for name in TEACHERS],
            "teachers",
        )
        students = _gather(
            [
                workers.submit(train_student, p, size, name)
                for size in STUDENTS
                for p in places
                for name in TEACHERS
            ],
            "students",
        )
        runs = _gather(
            [workers.submit(run_student, p, size) for size in STUDENTS for p in places], "arms"
        )
        cross_check = _cross_check(workers, places[0])
    return {
        "settings": settings.as_dict(),
        "num_jobs": num_jobs,
        "teachers": teachers,
        "students": students,
        "runs": [record for records in runs for record in records],
        "cross_check": cross_check,
        "seconds": time.perf_counter() - started,
    }


def _cross_check(workers: Executor, place: Place) -> dict[str, Any]:
    """The commands, beside repetitions in this process."""
    commands = workers.submit(run_commands, place)
    repeats = [
        workers.submit(repeat_in_process, place, draws)
        for draws in range(1, place.settings.num_repeats + 1)
    ]
    return {
        "commands": _gather([commands], "commands")[0],
        "in_process": _gather(repeats, "repetitions"),
    }


def _gather(futures: list[Future[Any]], name: str) -> list[Any]:
    """All results in order, with a line of progress for each."""
    results = []
    for number, future in enumerate(futures, 1):
        results.append(future.result())
        print(f"{name}: {number} of {len(futures)}", flush=True)
    return results


def _begin_worker() -> None:
    """What a process of the study does first."""
    import torch
    from transformers.utils import logging

    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the study is gone, however it went."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


if __name__ == "__main__":
    main()
