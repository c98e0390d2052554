"""Runs made up from a seed, written with the run's own writers: for tests and pictures.

A made-up model learns to multiply: its answers get right more often, and shorter, as steps go by.
Every fourth answer calls a calculator, so it has a segment that the environment wrote and two
weight versions. Everything a run writes is there: configuration, metrics, samples, what the trainer
made of them, evaluations, the ledger, a trace and a tokenizer.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rollmill.data.ledger import Ledger, State
from rollmill.sample import EngineCounters, Group, Sample, Segment, Status
from rollmill.telemetry.dropped import Dropped, DroppedDump
from rollmill.telemetry.samples import SampleDump
from rollmill.telemetry.timeline import Timeline
from rollmill.telemetry.trained import TrainedDump, TrainedSample

START, END = "<|im_start|>", "<|im_end|>"
FIRST_MOMENT = 1_790_000_000.0
NAMES = ("Ada", "Emmy", "Sofia", "Alan", "Kurt", "Henri", "Mary", "Leonhard")
THINGS = ("boxes", "crates", "shelves", "rows", "sacks")
PARTS = ("apples", "bolts", "books", "seats", "stones")


@dataclass(frozen=True)
class Shape:
    """How large a made run is, and how well it learns."""

    num_steps: int = 12
    num_groups: int = 8
    num_answers: int = 4
    seed: int = 0
    pace: float = 4.0
    is_traced: bool = True


def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that any text, and bytes that are no text, can be written."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([START, END])
    return tokenizer


def make_run(root: Path, shape: Shape | None = None, tokenizer: Tokenizer | None = None) -> Path:
    """Write a made-up run into `root`; returns it."""
    maker = _Maker(root, shape or Shape(), tokenizer or byte_tokenizer())
    maker.write()
    return root


class _Maker:
    def __init__(self, root: Path, shape: Shape, tokenizer: Tokenizer) -> None:
        self.root, self.shape, self.tokenizer = root, shape, tokenizer
        self.random = np.random.default_rng(shape.seed)
        self.now = FIRST_MOMENT
        self.lines: list[bytes] = []
        self.index = 0
        self.moments: list[float] = []

    def write(self) -> None:
        (self.root / "tokenizer").mkdir(parents=True)
        self.tokenizer.save(str(self.root / "tokenizer" / "tokenizer.json"))
        self._write_config()
        self.ledger = Ledger(self.root / "ledger.sqlite")
        self.timeline = Timeline(self.root / "trace" if self.shape.is_traced else None)
        self._evaluate(0)
        for step in range(1, self.shape.num_steps + 1):
            self._step(step)
            if step % 5 == 0 or step == self.shape.num_steps:
                self._evaluate(step)
        self.ledger.close()
        self._set_moments()
        (self.root / "metrics.jsonl").write_bytes(b"".join(self.lines))

    def skill(self, step: int) -> float:
        return 0.08 + 0.84 / (
            1 + math.exp(-self.shape.pace * (2 * step / self.shape.num_steps - 1))
        )

    def sample(self, step: int, group: int, attempt: int) -> Sample:
        rng = np.random.default_rng((self.shape.seed, group))
        a, b = int(rng.integers(3, 30)), int(rng.integers(12, 99))
        name, thing, part = rng.choice(NAMES), rng.choice(THINGS), rng.choice(PARTS)
        question = f"{name} has {a} {thing} with {b} {part} each. How many {part} is that?"
        is_right = self.random.random() < self.skill(step)
        pieces = self._answer(step, a, b, thing, is_right)
        is_cut = not is_right and self.random.random() < 0.35
        closed = pieces if is_cut else [*pieces[:-1], (pieces[-1][0] + END, "engine")]
        segments = [self._segment(text, source, step) for text, source in closed]
        response = "".join(text for text, _ in pieces)
        self.index += 1
        return Sample(
            prompt_tokens=self.ids(f"{START}user\n{question}{END}\n{START}assistant\n"),
            index=self.index - 1,
            group_index=group,
            attempt=attempt,
            prompt=[
                {"role": "system", "content": "End with the number alone after “Answer:”."},
                {"role": "user", "content": question},
            ],
            label=str(a * b),
            metadata={"reward_parts": {"correct": float(is_right), "format": float(not is_cut)}},
            segments=segments,
            response=response,
            status=Status.TRUNCATED if is_cut else Status.COMPLETED,
            reward=0.9 * is_right + 0.1 * (not is_cut),
            reward_outcome="value" if not is_cut else "invalid",
            reward_detail=None if is_cut else f"answer {response.rsplit(' ', 1)[-1]}",
            timing={"generate_s": float(self.random.gamma(4, 0.6)), "reward_s": 0.0021},
            counters=EngineCounters(num_calls=len(pieces), prompt_tokens=60, cached_tokens=31),
        )

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _answer(
        self, step: int, a: int, b: int, thing: str, is_right: bool
    ) -> list[tuple[str, str]]:
        result = a * b if is_right else a * b + int(self.random.choice([-10, -1, 2, 10, 100]))
        doubts = round((1 - self.skill(step)) * 3)
        wait = "Wait, let me do that again, one digit at a time. " * int(
            self.random.integers(doubts + 1)
        )
        opening = f"There are {a} {thing} and {b} in each, so I multiply {a} × {b}.\n"
        if self.random.random() < 0.25:
            return [
                (f"{opening}<tool>{a}*{b}</tool>", "engine"),
                (f"\n<result>{a * b}</result>\n", "environment"),
                (f"{wait}So it is {result}.\nAnswer: {result}", "engine"),
            ]
        tens, ones = b // 10 * 10, b % 10
        return [
            (
                f"{opening}{a} × {tens} = {a * tens} and {a} × {ones} = {a * ones}.\n"
                f"{wait}Together that makes {result}.\nAnswer: {result}",
                "engine",
            )
        ]

    def _segment(self, text: str, source: str, step: int) -> Segment:
        ids = self.ids(text)
        if source == "environment":
            return Segment.from_environment(ids)
        sure = 0.25 + 0.6 * self.skill(step)
        raw = -self.random.gamma(0.35, 2.4 * (1.1 - sure), len(ids))
        version = max(0, step - 1 - int(self.random.random() < 0.2))
        return Segment.from_engine(ids, np.maximum(raw, -14).astype(np.float32), version)

    def _step(self, step: int) -> None:
        shape, start = self.shape, self.now
        first = (step - 1) * (shape.num_groups + 1)
        groups = [
            [self.sample(step, first + g, k) for k in range(shape.num_answers)]
            for g in range(shape.num_groups + 1)
        ]
        kept = groups[:-1]
        rollout = self._roll_out(step, start, first, groups)
        samples = [sample for group in kept for sample in group]
        train, sync = 1.5 + 0.1 * self.random.random(), 0.2
        self.timeline.add("loop", "rollout", start, start + rollout)
        self.timeline.add("loop", "train", start + rollout, start + rollout + train)
        self.timeline.add(
            "trainer", "forward backward", start + rollout, start + rollout + train * 0.9
        )
        self.timeline.add("loop", "sync", start + rollout + train, start + rollout + train + sync)
        self.timeline.step_done(step)
        self.now = start + rollout + train + sync
        SampleDump(self.root / "samples").write(step, samples)
        dropped = Dropped(Group(first + shape.num_groups, groups[-1]), "rejected", "no spread")
        DroppedDump(self.root / "dropped", 64).write(step, [dropped])
        TrainedDump(self.root / "trained").write(step, [self._trained(s, kept) for s in samples])
        self._log(
            "train",
            step,
            self._figures(step, samples, groups[-1])
            | {
                "time/rollout_s": rollout,
                "time/train_s": train,
                "time/sync_s": sync,
                "time/step_s": rollout + train + sync,
            },
        )

    def _trained(self, sample: Sample, groups: Sequence[Sequence[Sample]]) -> TrainedSample:
        group = next(g for g in groups if g[0].group_index == sample.group_index)
        rewards = np.array([float(s.reward or 0) for s in group])
        spread = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
        noise = self.random.standard_t(2, sample.response_length) * 2e-3
        own = np.minimum(sample.rollout_log_probs + noise, 0)
        own[~sample.loss_mask] = np.nan
        advantage = (float(sample.reward or 0) - rewards.mean()) / (spread + 1e-6)
        return TrainedSample(sample.index, own.astype(np.float32), float(advantage))

    def _roll_out(
        self, step: int, start: float, first: int, groups: Sequence[Sequence[Sample]]
    ) -> float:
        """Book the groups, draw their requests on two engines; how long it took."""
        last = start
        ends = []
        for number, group in enumerate(groups):
            self._book(first + number, State.ISSUED, start, step)
            self._book(first + number, State.IN_FLIGHT, start, step)
            seconds = [s.response_length * 0.012 + self.random.gamma(2, 0.25) for s in group]
            for attempt, took in enumerate(seconds):
                lane = f"engine {(number + attempt) % 2}"
                details = {"group": first + number, "tokens": group[attempt].response_length}
                self.timeline.add(lane, "generate", start, start + took, **details)
                self.timeline.add("rewards", "judge", start + took, start + took + 0.03, **details)
            ends.append(start + max(seconds) + 0.03)
        for number in np.argsort(ends):
            tokens = sum(sample.response_length for sample in groups[number])
            is_kept = number < len(groups) - 1
            state, reason = (State.READY, None) if is_kept else (State.REJECTED, "no spread")
            self._book(first + int(number), state, ends[number], step, reason, tokens)
            last = max(last, ends[number])
        for number in range(len(groups) - 1):
            tokens = sum(sample.response_length for sample in groups[number])
            self._book(first + number, State.CONSUMED, last + 1.6, step, None, tokens)
        return last - start

    def _book(
        self,
        group: int,
        state: State,
        when: float,
        step: int,
        reason: str | None = None,
        tokens: int = 0,
    ) -> None:
        self.ledger.record(group, state, step=step, reason=reason, num_tokens=tokens)
        self.moments.append(when)

    def _set_moments(self) -> None:
        """The ledger stamps events with the clock; a made run has its own time."""
        with closing(sqlite3.connect(self.root / "ledger.sqlite")) as db, db:
            rows = [(when, seq) for seq, when in enumerate(self.moments, start=1)]
            db.executemany("UPDATE events SET time = ? WHERE seq = ?", rows)

    def _figures(
        self, step: int, samples: Sequence[Sample], rejected: Sequence[Sample]
    ) -> dict[str, float]:
        rewards = np.array([float(s.reward or 0) for s in samples])
        by_group = rewards.reshape(-1, self.shape.num_answers)
        lengths = np.array([s.response_length for s in samples])
        lost = float(sum(s.response_length for s in rejected))
        noise = self.random.standard_normal(8)
        skipped = float(lengths[:: max(2, len(lengths) // 3)].sum())
        return {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "reward/part/correct": float(np.mean(rewards > 0.5)),
            "reward/part/format": float(np.mean([s.status is Status.COMPLETED for s in samples])),
            "reward/outcome/invalid": float(
                np.mean([s.reward_outcome == "invalid" for s in samples])
            ),
            "reward/outcome/timeout": 0.0,
            "reward/outcome/error": 0.0,
            "rollout/response_length_mean": float(lengths.mean()),
            "rollout/response_length_max": float(lengths.max()),
            "rollout/truncated": float(np.mean([s.status is Status.TRUNCATED for s in samples])),
            "rollout/zero_std_groups": float(np.mean(np.ptp(by_group, axis=1) == 0)),
            "rollout/generated_tokens": float(lengths.sum()) + lost,
            "rollout/wasted_tokens": lost,
            "rollout/wasted_tokens/rejected": lost,
            "rollout/tokens_per_second": 2100 + 90 * float(noise[0]),
            "rollout/length_bias": 0.97,
            "rollout/staleness_mean": 0.2 + 0.05 * float(noise[1]),
            "rollout/staleness_max": 1.0,
            "train/policy/entropy": 0.35 + 0.9 * (1 - self.skill(step)) + 0.02 * float(noise[2]),
            "train/policy/old_kl": 2e-4 * math.exp(0.3 * float(noise[3])),
            "train/policy/clip_fraction": 0.012 * math.exp(0.3 * float(noise[4])),
            "train/optimizer/grad_norm": 0.7
            + 0.5 * math.exp(0.4 * float(noise[5])) * (1.2 - self.skill(step)),
            "train/optimizer/lr": 3e-6 * min(1.0, step / 10),
            "train/loss/total": 0.02 * float(noise[6]),
            "train/mismatch/log_prob_diff_mean": 2.1e-3 * math.exp(0.1 * float(noise[7])),
            "train/mismatch/log_prob_diff_max": 0.31 * math.exp(0.5 * float(noise[0])),
            "train/mismatch/ess": 0.985 - 0.01 * abs(float(noise[1])),
            "train/tokens/trained": float(lengths.sum()) - skipped,
            "train/tokens/skipped": skipped,
            "train/tokens/positions": float(lengths.sum()) * 1.4,
            "train/tokens/padding_share": 0.021 + 0.004 * abs(float(noise[2])),
            "train/tokens/per_second": 3900 + 120 * float(noise[3]),
            "weights/changed_share": 0.61 + 0.02 * float(noise[4]),
        }

    def _evaluate(self, step: int) -> None:
        answers = [self.sample(step, 1_000_000 + g, 0) for g in range(16)]
        SampleDump(self.root / "eval" / "held_out").write(step, answers)
        rewards = [float(s.reward or 0) for s in answers]
        figures = {
            "eval/held_out/reward": float(np.mean(rewards)),
            "eval/held_out/pass@1": float(np.mean([r > 0.5 for r in rewards])),
            "time/eval_s": 2.5,
        }
        self.now += 2.5
        self._log("eval", step, figures)

    def _log(self, kind: str, step: int, figures: dict[str, float]) -> None:
        record = {"step": step, "kind": kind, "time": self.now, **figures}
        self.lines.append(json.dumps(record).encode() + b"\n")

    def _write_config(self) -> None:
        values = {
            "run": {"num_steps": self.shape.num_steps, "seed": self.shape.seed},
            "model": {"path": "no/such/model", "tokenizer": None},
            "rollout": {"max_staleness": 1},
            "reward": {"reward_key": None},
            "trainer": {"algorithm": {"advantage": "grpo"}},
        }
        (self.root / "config.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
