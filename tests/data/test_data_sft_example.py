"""The SFT example: its conversations, and what is learned of them."""

import json
import subprocess
import sys
from pathlib import Path

from masks_testkit import learned_texts

from rollmill.config.load import load_config
from rollmill.data.demonstrations import load_demonstrations
from rollmill.data.template import load_tokenizer
from rollmill.models import resolve_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "sft"


def test_both_answers_of_each_conversation_are_learned_and_held_out_people_are_not_in_them(
    tmp_path: Path,
) -> None:
    script = [sys.executable, str(EXAMPLE / "make_data.py"), "--out", str(tmp_path)]
    subprocess.run([*script, "--num-train", "20", "--num-eval", "5"], check=True)
    config = load_config(EXAMPLE / "config.yaml", [f"data.path={tmp_path}/train.jsonl"])
    tokenizer = load_tokenizer(resolve_model(config.model.path))
    rows = load_demonstrations(
        config.data, tokenizer=tokenizer, context_length=config.model.context_length
    ).rows
    lines = (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()
    talks = [json.loads(line)["messages"] for line in lines]
    assert [learned_texts(row, tokenizer) for row in rows] == [
        [talk[1]["content"] + "<|im_end|>", talk[3]["content"] + "<|im_end|>"] for talk in talks
    ]
    asked = (tmp_path / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    names = {json.loads(line)["label"]["name"] for line in asked}
    assert not [name for name in names if any(name in line for line in lines)]
