"""The thread that owns the model.

One thread runs all model code, so the event loop that serves HTTP never waits for a forward
pass and the model needs no locks. Others talk to it by leaving commands, which it carries out
between two steps; that is also why a weight update never falls into the middle of a step.

Policy on failures: when a step raises, whatever was started ends with an error (HTTP 500), the
KV cache is emptied and the engine goes on with the requests that wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

import torch

from rollmill.engine.embedded import checkpoint
from rollmill.engine.embedded.counters import Counters
from rollmill.engine.embedded.logprobs import note_input_logprobs
from rollmill.engine.embedded.model import ModelRunner, StepLogits
from rollmill.engine.embedded.sampler import Sampled, Sampler
from rollmill.engine.embedded.scheduler import Scheduler
from rollmill.engine.embedded.sequence import Sequence
from rollmill.engine.embedded.steps import Step
from rollmill.engine.embedded.stopping import StopRules

logger = logging.getLogger(__name__)

T = TypeVar("T")
PauseMode = Literal["abort", "retract", "in_place"]
MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")


class BusyError(RuntimeError):
    """The engine must be idle (or paused by retract) for what was asked."""


class EmbeddedEngine:
    """Runs requests in batches on its own thread.

    Args:
        runner: the model.
        stops: when a sequence ends.
        weight_version: name of the weights that are loaded.
        notify: called on the model's thread with sequences that moved on (streamed ones) or
            ended; must return quickly.
        num_threads: CPU threads of the model; None leaves torch's choice.
    """

    def __init__(
        self,
        runner: ModelRunner,
        stops: StopRules,
        *,
        weight_version: str,
        notify: Callable[[list[Sequence]], None],
        num_threads: int | None = None,
    ) -> None:
        self.runner = runner
        self._num_threads = num_threads
        self.scheduler = Scheduler(runner.limits)
        self.weight_version = weight_version
        self.num_updates = 0
        self.counters = Counters()
        self.pause_mode: PauseMode | None = None
        self.released: set[str] = set()
        self.step_delay_s = 0.0
        self._stops = stops
        self._sampler = Sampler(stops.eos_ids)
        self._notify = notify
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="rollmill-model", daemon=True)

    # From any thread ---------------------------------------------------------------------

    def start(self) -> None:
        """Start the model's thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current step; unfinished requests are aborted."""
        if not self._thread.is_alive():
            return
        self._post(self._begin_stop)
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the model's thread runs."""
        return self._thread.is_alive() and not self._is_stopping

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the model's thread between two steps."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 (handed to the caller, whatever it is)
                future.set_exception(error)

        self._post(command)
        return future

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence that `Scheduler.check_fits` accepts."""
        self._post(lambda: self._add(sequence))

    def abort(self, matches: Callable[[Sequence], bool], message: str | None = None) -> None:
        """End matching sequences with what they have; unknown ones are ignored."""
        self._post(lambda: self._abort_now(matches, message))

    # On the model's thread, through `call` -----------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping: abort everything, or keep it with (`in_place`) or without its KV."""
        self.pause_mode = mode
        if mode == "abort":
            self._abort_now(lambda _: True, None)
        elif mode == "retract":
            self.counters.retractions += len(self.scheduler.running)
            self.scheduler.retract_all()
            self._settle()

    def resume(self) -> None:
        """Go on after `pause`."""
        self.pause_mode = None

    def flush_cache(self) -> bool:
        """Forget held prefixes; False when requests run or wait to."""
        if not self._is_quiet():
            return False
        self.scheduler.forget_prefixes()
        self._settle()
        return True

    def release_memory(self, tags: set[str]) -> None:
        """Give memory back until `resume_memory`; requests wait meanwhile.

        Raises:
            BusyError: requests are running.
        """
        if not self._is_quiet():
            raise BusyError("release_memory_occupation needs an idle or retract-paused engine")
        if "kv_cache" in tags:
            self.scheduler.forget_prefixes()
            self._settle()
            self.runner.release_kv()
        if "weights" in tags:
            self.runner.offload_weights()
        self.released |= tags

    def resume_memory(self, tags: set[str]) -> None:
        """Take released memory back.

        Raises:
            ValueError: a tag was not released.
        """
        missing = sorted(tags - self.released)
        if missing:
            raise ValueError(f"not released, so it cannot be resumed: {', '.join(missing)}")
        if "weights" in tags:
            self.runner.onload_weights()
        self.released -= tags

    def replace_weights(
        self, weights: Mapping[str, torch.Tensor], version: str | None, *, abort_all: bool
    ) -> None:
        """Copy checked weights in; running sequences go on with the KV they have.

        Raises:
            BusyError: the weights' memory is released.
        """
        if "weights" in self.released:
            raise BusyError("the weights are released; resume them before an update")
        if abort_all:
            self._abort_now(lambda _: True, None)
        self.num_updates += 1  # first: a failure in the middle changes weights too
        checkpoint.replace_weights(self.runner.model, weights)
        self.scheduler.forget_prefixes()
        self._settle()
        if version is not None:
            self.weight_version = version

    # The thread --------------------------------------------------------------------------

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)  # OpenMP keeps the number per thread
        while not self._is_stopping:
            for command in self._take_commands():
                command()
            if self._can_step():
                self._step()

    def _take_commands(self) -> list[Callable[[], None]]:
        with self._wake:
            while not self._commands and not self._can_step():
                self._wake.wait()
            commands = list(self._commands)
            self._commands.clear()
        return commands

    def _can_step(self) -> bool:
        return (
            not self._is_stopping
            and self.pause_mode is None
            and not self.released
            and self.scheduler.num_unfinished > 0
        )

    def _begin_stop(self) -> None:
        self._is_stopping = True
        self._abort_now(lambda _: True, "The engine is shutting down")

    def _add(self, sequence: Sequence) -> None:
        if self._is_stopping:
            sequence.finish(abort_reason("The engine is shutting down"), self.weight_version)
            self._notify([sequence])
            return
        self.counters.requests += 1
        self.counters.prompt_tokens += len(sequence.prompt)
        self.scheduler.add(sequence)

    def _abort_now(self, matches: Callable[[Sequence], bool], message: str | None) -> None:
        queued = {id(s) for s in self.scheduler.waiting if not s.output}
        removed = self.scheduler.remove(matches)
        for sequence in removed:
            default = "Abort in waiting queue" if id(sequence) in queued else "Aborted"
            sequence.finish(abort_reason(message or default), self.weight_version)
        self.counters.aborted += len(removed)
        self._settle()
        if removed:
            self._notify(removed)

    def _is_quiet(self) -> bool:
        started = self.scheduler.running or self.scheduler.fills
        return not started and (self.pause_mode is not None or not self.scheduler.waiting)

    def _settle(self) -> None:
        """Free what the scheduler dropped, without waiting for the next step."""
        rows, blocks = self.scheduler.take_dropped()
        self.runner.give_up(rows, blocks)

    def _step(self) -> None:
        started = time.monotonic()
        step = self.scheduler.plan()
        for sequence in step.finished:
            self._finish_prompt(sequence)
        moved = list(step.finished)
        try:
            self._carry_out(step, moved)
        except Exception as error:
            logger.exception("a step of the engine failed; its requests end with an error")
            moved += self._fail_started(error)
        self._settle()
        if moved:
            self._notify(moved)
        if self.step_delay_s:
            time.sleep(self.step_delay_s)
        now = time.monotonic()
        self.counters.steps += 1
        self.counters.busy_s += now - started
        self.counters.recent.append((now, len(step.decode)))

    def _carry_out(self, step: Step, moved: list[Sequence]) -> None:
        """Compute the step; the sequences whose readers must hear of it are added to `moved`, as
        they end: those that have ended are told so even when the step fails after that."""
        self.runner.carry_out(step)
        if not step.has_work:
            return
        for admission in step.admissions:
            if not admission.sequence.num_retractions:  # else it was counted when it came first
                self.counters.cached_tokens += admission.sequence.cached_tokens or 0
        logits = self.runner.compute(step)
        self._take_tokens(logits, moved)
        for chunk, first, rows in logits.prompts:
            note_input_logprobs(chunk, first, rows)
        for sequence in self.scheduler.commit(step):
            self._finish_prompt(sequence)
            moved.append(sequence)

    def _take_tokens(self, logits: StepLogits, moved: list[Sequence]) -> None:
        if not logits.sequences:
            return
        with torch.inference_mode():
            sampled = self._sampler.sample(logits.sequences, logits.decode)
        for row, sequence in enumerate(logits.sequences):
            reason = self._take_token(sequence, row, sampled)
            if reason is not None:
                self.scheduler.retire(sequence)
                sequence.finish(reason, self.weight_version)
            if reason is not None or sequence.has_news:
                moved.append(sequence)
        self.counters.generated_tokens += len(logits.sequences)

    def _take_token(self, sequence: Sequence, row: int, sampled: Sampled) -> dict[str, Any] | None:
        if not sampled.is_finite[row]:
            return abort_reason("The model computed logits that are not finite", 500)
        if row in sampled.top:
            sequence.output_top.append(sampled.top[row])
        if row in sampled.by_id:
            sequence.output_by_id.append(sampled.by_id[row])
        sequence.append(sampled.tokens[row], sampled.logprobs[row], self.weight_version)
        return self._stops.check(sequence)

    def _finish_prompt(self, sequence: Sequence) -> None:
        sequence.finish({"type": "length", "length": 0}, self.weight_version)

    def _fail_started(self, error: Exception) -> list[Sequence]:
        started = {id(s) for s in self.scheduler.running}
        started |= {id(fill.sequence) for fill in self.scheduler.fills}
        failed = self.scheduler.remove(lambda s: id(s) in started)
        for sequence in failed:
            sequence.finish(abort_reason(f"The engine failed: {error}", 500), self.weight_version)
        self.scheduler.forget_prefixes()
        self._settle()
        self.runner.release_kv()
        return failed


def abort_reason(message: str, status_code: int | None = None) -> dict[str, Any]:
    """SGLang's finish reason of an aborted request."""
    kind = None if status_code is None else "InternalServerError"
    return {"type": "abort", "message": message, "status_code": status_code, "err_type": kind}
