"""A run folder in which every text that a model, a user or a grader can choose is an attack.

Whatever of it runs in a page sets `window.pwned` or changes the title.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from support.made_run import Shape, byte_tokenizer, make_run

SCRIPTS = (
    "<script>window.pwned=1;document.title='pwned'</script>",
    '"><img src=x onerror="window.pwned=1">',
    "<svg/onload=window.pwned=1>",
    "javascript:window.pwned=1",
    "{{constructor.constructor('window.pwned=1')()}}</textarea></div>",
)
CONTROL = "bell\x07 null\x00 escape\x1b[31m right-to-left\u202eevil\u202c zero\u200bwidth"
HUGE = "A" * 3_000_000
ZALGO = "Z" + "\u0301" * 200
SURROGATE_JSON = '"lone \\ud800 surrogate"'
ROWS = (*SCRIPTS, CONTROL, HUGE, ZALGO, "", "\ufffd\ufffe")
BROKEN_BYTES = (0xFF, 0xC3, 0x28, 0xF0, 0x9F)


def make_hostile_run(root: Path) -> Path:
    """Write the run; returns its folder. Row n of step 1 holds `ROWS[n]`."""
    make_run(root, Shape(num_steps=2, num_groups=3, num_answers=4))
    path = root / "samples" / "step_000001.parquet"
    rows = pq.read_table(path).to_pylist()[: len(ROWS)]
    tokenizer = byte_tokenizer()
    alphabet = {b: tokenizer.token_to_id(c) for b, c in _byte_characters().items()}
    for row, text in zip(rows, ROWS, strict=True):
        broken = [alphabet[b] for b in BROKEN_BYTES] + [9_999_999, -1]
        ids = [*tokenizer.encode(text[:20_000], add_special_tokens=False).ids, *broken]
        row |= {
            "response": text,
            "response_tokens": ids,
            "rollout_log_probs": [float("nan"), *np.linspace(-20, 0, len(ids) - 1).tolist()],
            "segments": [_segment(len(ids))],
            "prompt_json": json.dumps([{"role": text[:99], "content": text}]),
            "label_json": SURROGATE_JSON,
            "metadata_json": json.dumps({text[:99]: [text[:99]]}),
            "reward_json": "1e999" if text == "" else "0.5",
            "score": float("inf") if text == "" else 0.5,
            "reward_detail": text,
            "failure": text,
        }
    rows[1]["prompt_json"] = '[{"role": "user", "content": "\\ud83d alone"}, 7, null]'
    pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(path)), path)
    path = root / "dropped" / "step_000001.parquet"
    table = pq.read_table(path)
    rows = [row | {"decision": SCRIPTS[2], "reason": SCRIPTS[1]} for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    with (root / "metrics.jsonl").open("a", encoding="utf-8") as file:
        record = {"step": 2, "kind": "train", "time": 1.79e9, f"reward/part/{SCRIPTS[0]}": 1.0}
        file.write(json.dumps(record) + "\n{torn")
    with closing(sqlite3.connect(root / "ledger.sqlite")) as db, db:
        db.execute("UPDATE groups SET reason = ? WHERE state = 'rejected'", (SCRIPTS[1],))
        db.execute("UPDATE events SET reason = ?", (SCRIPTS[0],))
    return root


def _segment(length: int) -> dict[str, object]:
    return {
        "length": length,
        "trainable": True,
        "weight_version": 0,
        "source": "engine",
        "has_log_probs": True,
    }


def _byte_characters() -> dict[int, str]:
    """The character by which byte-level tokenizers write each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}
