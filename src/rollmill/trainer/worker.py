"""The trainer as a worker process sees it: bytes and plain values in, plain values out.

`TorchTrainer` is created inside its own process and called by name. It owns the model; samples
arrive as the bytes of `sample_codec`, and everything it returns can be sent as msgpack.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from rollmill.config.opd import OpdConfig
from rollmill.config.trainer import LoraConfig, TrainerConfig
from rollmill.errors import CheckpointError, ConfigError, ModelError, TrainerError
from rollmill.sample import Sample
from rollmill.sample_codec import decode_group, decode_sample
from rollmill.trainer.algorithm import Algorithm, find_algorithm
from rollmill.trainer.critic import ValueModel
from rollmill.trainer.flops import measure_peak
from rollmill.trainer.layout import TokenSequence
from rollmill.trainer.learner import Learner
from rollmill.trainer.lora import BasePolicy, add_adapters
from rollmill.trainer.placement import Placement
from rollmill.trainer.policy import Policy
from rollmill.trainer.ranks import Ranks
from rollmill.trainer.scoring import score_sequences
from rollmill.trainer.state import load_state, save_state
from rollmill.trainer.weight_files import DTYPES, WeightWriter, export_folder
from rollmill.trainer.weight_methods import WeightMethods
from rollmill.trainer.weight_sender import WeightSender
from rollmill.trainer.weight_store import WeightStore

logger = logging.getLogger(__name__)

CRITIC_FOLDER = "critic"
"""Folder of the critic's state inside the trainer's."""

AnyPolicy = TypeVar("AnyPolicy", bound=Policy)


class TorchTrainer(WeightMethods):
    """The `torch` backend on one rank.

    Args:
        config: `TrainerConfig` as plain values.
        model_path: Hugging Face folder of the starting weights.
        seed: of everything random in the trainer.
        num_total_steps: calls of `train` in the whole run, for the learning-rate schedule.
        context_length: most tokens of a sample.
        base_dir: folder that custom functions' files are relative to.
        opd: `OpdConfig` as plain values; None has no distillation term.
        rank: this process among the trainer's ranks, from 0.
        num_ranks: how many there are. Every call goes to all of them with the same arguments, at
            the same time; all train on their share, rank 0 writes the files, and results are the
            same on all but for times (`write_weights` and `sample_reports` answer on rank 0 only).
        rendezvous: `tcp://host:port` where the ranks meet, when there are several.
    """

    def __init__(
        self,
        *,
        config: dict[str, Any],
        model_path: str,
        seed: int,
        num_total_steps: int,
        context_length: int,
        base_dir: str | None = None,
        opd: dict[str, Any] | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        rendezvous: str | None = None,
    ) -> None:
        self._config = TrainerConfig.model_validate(config)
        self._source = Path(model_path)
        num_cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(self._config.num_threads or max(num_cores // num_ranks, 1))
        torch.manual_seed(seed)
        transformers_logging.disable_progress_bar()
        algorithm = find_algorithm(
            self._config.algorithm,
            base_dir=Path(base_dir) if base_dir else None,
            opd=None if opd is None else OpdConfig.model_validate(opd),
        )
        device = _device(self._config, rank, num_ranks)
        self._ranks = Ranks(rank, num_ranks, rendezvous=rendezvous, device=device)
        self._policy = self._load(self._source, device, Policy, lora=self._config.lora)
        self._learner = Learner(
            self._policy,
            self._config,
            algorithm,
            num_total_steps=num_total_steps,
            reference=self._reference(device),
            context_length=context_length,
            ranks=self._ranks,
            value_model=self._value_model(algorithm, device),
            peak_operations=self._peak(device),
        )
        self._placement = Placement(self._learner)
        self._writer = WeightWriter(self._policy.model, is_writer=self._ranks.is_first)
        self._store = WeightStore(self._policy.model, is_holder=self._ranks.is_first)
        self._sender = WeightSender(self._store, is_sender=self._ranks.is_first, device=device)

    def describe(self) -> dict[str, Any]:
        """Facts about the model, for the log."""
        return {
            "parameters": self._policy.num_parameters,
            "trained_parameters": self._policy.num_trained_parameters,
            "vocab_size": self._policy.vocab_size,
            "device": str(self._policy.device),
            "dtype": self._config.dtype,
            "num_threads": torch.get_num_threads(),
            "has_chunked_log_probs": self._policy.head is not None,
            "can_share_prefixes": self._policy.can_use_trees,
            "packs_without_mask": not self._policy.needs_mask,
        }

    def train(
        self,
        groups: list[bytes],
        *,
        step: int,
        reward_key: str | None,
        max_new_tokens: int,
        temperature: float,
    ) -> dict[str, float]:
        """Train on one batch of encoded groups; the metrics. See `Learner.learn`."""
        self._placement.onload()
        return self._learner.learn(
            [decode_group(data) for data in groups],
            step=step,
            reward_key=reward_key,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
        )

    def offload(self) -> None:
        """Keep everything in CPU memory until the next `onload` or `train`: for engines that share
        the device. Weights can still be written and states saved and loaded."""
        self._placement.offload()

    def onload(self) -> None:
        """Back to the device."""
        self._placement.onload()

    def sample_reports(self) -> list[dict[str, Any]]:
        """What the last call of `train` measured of each sample, once; see `sample_reports`."""
        reports, self._learner.sample_reports = self._learner.sample_reports, []
        return reports if self._ranks.is_first else []

    def score(self, samples: list[bytes], *, temperature: float) -> list[bytes]:
        """Log-probs of all response tokens under the current weights.

        Args:
            samples: encoded samples.
            temperature: logits are divided by it.

        Returns:
            Per sample, raw float32, one entry per response token.
        """
        self._placement.onload()
        scores = score_sequences(
            self._policy,
            [_response_sequence(decode_sample(data)) for data in samples],
            budget=self._config.max_tokens_per_micro_batch,
            temperature=temperature,
            ranks=self._ranks,
        )
        return [values.tobytes() for values in scores]

    def write_weights(self, path: str, *, dtype: str) -> dict[str, Any]:
        """Write the weights for the engines; see `WeightWriter.write`."""
        result = self._writer.write(Path(path), dtype=dtype)
        self._ranks.wait()
        return result

    def save(self, path: str) -> None:
        """Write the trainer's complete state into a folder; see `state`.

        Raises:
            CheckpointError: it cannot be written; raised on every rank, so that none waits for the
                one that writes.
        """
        critic = self._learner.critic
        states: list[tuple[Path, Any, Any]] = [
            (Path(path), self._policy.model, self._learner.optimizer)
        ]
        if critic is not None:
            states.append((Path(path) / CRITIC_FOLDER, critic.model.model, critic.optimizer))
        failure: CheckpointError | None = None
        for folder, model, optimizer in states:
            try:
                save_state(
                    folder,
                    model,
                    optimizer,
                    num_optimizer_steps=self._learner.num_optimizer_steps,
                    is_writer=self._ranks.is_first,
                )
            except CheckpointError as error:
                failure = error
        self._raise_together(failure, path)

    def load(self, path: str) -> None:
        """Go on from what `save` wrote; CheckpointError when that is not possible."""
        self._learner.num_optimizer_steps = load_state(
            Path(path), self._policy.model, self._learner.optimizer
        )
        critic = self._learner.critic
        if critic is not None:
            load_state(Path(path) / CRITIC_FOLDER, critic.model.model, critic.optimizer)

    def export(self, path: str, *, dtype: str = "float32") -> None:
        """Write a Hugging Face folder with the tokenizer of the starting model.

        Raises:
            CheckpointError: it cannot be written; on every rank, as for `save`.
        """
        failure: CheckpointError | None = None
        try:
            export_folder(
                self._policy.model,
                Path(path),
                source=self._source,
                dtype=dtype,
                is_writer=self._ranks.is_first,
            )
        except CheckpointError as error:
            failure = error
        self._raise_together(failure, path)

    def parameters(self) -> list[torch.Tensor]:
        """The trained weights, detached; for callers in the same process (not through a wire)."""
        return [p.detach() for p in self._policy.model.parameters() if p.requires_grad]

    def close(self) -> None:
        """Leave the groups of ranks and of engines."""
        self._sender.leave()
        self._ranks.close()

    def _raise_together(self, failure: CheckpointError | None, path: str) -> None:
        """Raise on every rank when one could not write."""
        if self._ranks.max(int(failure is not None)):
            raise failure or CheckpointError("rank 0 could not write its files", where=path)

    def _peak(self, device: torch.device) -> float:
        """Operations per second of this rank's device, as stated or else as measured."""
        stated = self._config.peak_tflops
        return measure_peak(device, DTYPES[self._config.dtype]) if stated is None else stated * 1e12

    def _reference(self, device: torch.device) -> Policy | None:
        """What the KL term compares with; the base without adapters costs no second model."""
        if not self._config.algorithm.kl_coef:
            return None
        if self._config.lora is not None and self._config.reference_model is None:
            return BasePolicy(self._policy)
        folder = Path(self._config.reference_model or self._source)
        reference = self._load(folder, device, Policy)
        reference.model.requires_grad_(False)
        return reference

    def _load(
        self,
        folder: Path,
        device: torch.device,
        kind: type[AnyPolicy],
        *,
        lora: LoraConfig | None = None,
    ) -> AnyPolicy:
        model = _load_model(folder)
        if lora is not None:
            add_adapters(model, lora)
        if self._config.activation_checkpointing:
            recompute_activations(model)
        return kind(
            model,
            device=device,
            compute_dtype=DTYPES[self._config.dtype],
            chunk_tokens=self._config.logprob_chunk_tokens,
            layout=self._config.layout,
        )

    def _value_model(self, algorithm: Algorithm, device: torch.device) -> ValueModel | None:
        if not algorithm.needs_critic:
            return None
        return self._load(Path(self._config.critic.model or self._source), device, ValueModel)


def _load_model(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise ModelError(
            "the model folder is missing or has no config.json",
            where="model.path",
            expected="a Hugging Face model folder",
            found=str(folder),
        )
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
        ).eval()
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            "the model cannot be loaded",
            where=str(folder),
            expected="a causal language model that transformers knows",
            found=str(error),
        ) from error


def recompute_activations(model: Any) -> None:
    """Have every layer keep its input only and run again in the backward pass.

    transformers does so in training mode only, where dropout and the noise of routers are on too;
    log-probs must be a function of the tokens, so the model stays in evaluation mode.

    Raises:
        ConfigError: the model's layers are not known to bear it.
    """
    layers: list[Any] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            "the model's layers cannot be run again in the backward pass",
            where="trainer.activation_checkpointing",
            expected="a model that transformers can checkpoint",
            found=type(model).__name__,
            fix="set trainer.activation_checkpointing: false",
        )
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def _device(config: TrainerConfig, rank: int, num_ranks: int) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError(
            "there is no GPU",
            where="trainer.device",
            expected="cpu or auto on this machine",
            found="cuda",
        )
    if config.dtype == "float16":
        raise ConfigError(
            "training in float16 is not supported: gradients would underflow",
            where="trainer.dtype",
            expected="bfloat16 or float32",
            found="float16",
        )
    if not has_gpu or config.device == "cpu":
        return torch.device("cpu")
    if num_ranks > torch.cuda.device_count():
        raise ConfigError(
            "every rank needs a GPU of its own",
            where="trainer.num_ranks",
            expected=f"at most {torch.cuda.device_count()}, or trainer.device: cpu",
            found=str(num_ranks),
        )
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def _response_sequence(sample: Sample) -> TokenSequence:
    start = len(sample.prompt_tokens)
    if start == 0 and sample.response_length:
        raise TrainerError(
            "the first response token cannot be scored: nothing comes before it",
            where=f"sample {sample.index}",
            expected="a prompt of at least one token",
            found="an empty prompt",
        )
    targets: Sequence[int] = range(start, start + sample.response_length)
    return TokenSequence(sample.tokens, np.array(targets, np.int64), family=sample.group_index)
