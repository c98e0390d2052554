"""Draw the conversations of the SFT example: `python make_data.py [--seed N] [--out FOLDER]`.

Each one asks for facts out of a sentence as JSON, and then for one of them alone. Sentences, names
and the held-out prompts are those of the extract-JSON example. The same seed writes the same files.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
from pathlib import Path
from typing import Any

TASK = runpy.run_path(str(Path(__file__).parents[1] / "extract_json" / "make_data.py"))


def conversation(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A row of the task with its answer, and a second question."""
    fact = rng.choice(("name", "age", "city"))
    turns = (
        ("user", row["prompt"]),
        ("assistant", json.dumps(row["label"])),
        ("user", f"Only the {fact}, please."),
        ("assistant", str(row["label"][fact])),
    )
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def main() -> None:
    """Write train.jsonl (conversations) and eval.jsonl (prompts)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--num-train", type=int, default=256)
    parser.add_argument("--num-eval", type=int, default=24)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    draw_rows, write_rows = TASK["draw_rows"], TASK["write_rows"]
    known = TASK["TRAIN_PATTERNS"], TASK["TRAIN_NAMES"], TASK["TRAIN_CITIES"]
    rows = draw_rows(rng, args.num_train, *known)
    write_rows(args.out / "train.jsonl", (conversation(row, rng) for row in rows))
    patterns = TASK["TRAIN_PATTERNS"] + TASK["UNSEEN_PATTERNS"]
    names, cities = TASK["HELD_OUT_NAMES"], TASK["HELD_OUT_CITIES"]
    write_rows(args.out / "eval.jsonl", draw_rows(rng, args.num_eval, patterns, names, cities))
    print(f"{args.num_train} conversations and {args.num_eval} held-out prompts in {args.out}")


if __name__ == "__main__":
    main()
