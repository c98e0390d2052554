"""Draw the prompts of the extract-JSON example: `python make_data.py [--seed N] [--out FOLDER]`.

Every row asks for name, age and city out of one sentence. The evaluation set shares no name and no
city with the training set and uses two sentence patterns that training never shows, besides the
five it does. The same seed writes the same files.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROMPT = "Extract name, age and city as JSON: {sentence}"

TRAIN_PATTERNS = (
    "In {city} there is a {age}-year-old called {name}.",
    "{name} is {age} years old and lives in {city}.",
    "{name}, aged {age}, comes from {city}.",
    "My neighbour {name} moved here from {city} at the age of {age}.",
    "At {age}, {name} still works in {city}.",
)
UNSEEN_PATTERNS = (
    "{name} turned {age} this year and has a flat in {city}.",
    "Meet {name} ({age}) from {city}.",
)

TRAIN_NAMES = (
    "Vera Anna Boris Carla David Elena Felix Greta Hugo Irene Jonas Karin Leo Maria Nils Olga "
    "Peter Rosa Simon Tina Ulla Victor Wanda Xenia Yusuf Zoe Amir Bella Cyrus Diana Emil Fatima "
    "Georg Hanna Ivan Julia Kofi Lena Marco Nadia Omar Paula Quentin Rita Samir Thea Umar Viola"
).split()
HELD_OUT_NAMES = (
    "Arne Birgit Claude Dora Edgar Flora Gustav Helga Igor Jasmin Klaus Laura Mirko Nora Oskar "
    "Petra Ramon Sofia Tomas Ursula Vito Wilma Yara Zeno"
).split()

TRAIN_CITIES = (
    "Oslo Paris Rome Berlin Madrid Lisbon Vienna Prague Warsaw Athens Dublin London Zurich Geneva "
    "Milan Turin Lyon Nice Hamburg Munich Cairo Tunis Lagos Nairobi Tokyo Osaka Seoul Delhi Mumbai "
    "Lima Bogota Quito Boston Chicago Dallas Denver Toronto Sydney Perth Auckland"
).split()
HELD_OUT_CITIES = (
    "Bergen Porto Seville Naples Cracow Budapest Riga Vilnius Tallinn Helsinki Malmo Aarhus Ghent "
    "Bremen Salzburg Dakar Accra Hanoi Manila Santiago Montreal Seattle Houston Wellington"
).split()

AGES = range(18, 81)


def draw_rows(
    rng: random.Random,
    num_rows: int,
    patterns: tuple[str, ...],
    names: list[str],
    cities: list[str],
) -> Iterator[dict[str, Any]]:
    """`num_rows` different rows, the patterns in turn."""
    seen: set[str] = set()
    while len(seen) < num_rows:
        gold = {"name": rng.choice(names), "age": rng.choice(AGES), "city": rng.choice(cities)}
        sentence = patterns[len(seen) % len(patterns)].format(**gold)
        if sentence not in seen:
            seen.add(sentence)
            yield {"prompt": PROMPT.format(sentence=sentence), "label": gold}


def write_rows(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """One JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write train.jsonl and eval.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--num-train", type=int, default=512)
    parser.add_argument("--num-eval", type=int, default=128)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    train = draw_rows(rng, args.num_train, TRAIN_PATTERNS, TRAIN_NAMES, TRAIN_CITIES)
    write_rows(args.out / "train.jsonl", train)
    held_out = draw_rows(
        rng, args.num_eval, TRAIN_PATTERNS + UNSEEN_PATTERNS, HELD_OUT_NAMES, HELD_OUT_CITIES
    )
    write_rows(args.out / "eval.jsonl", held_out)
    print(f"{args.num_train} training and {args.num_eval} held-out prompts in {args.out}")


if __name__ == "__main__":
    main()
