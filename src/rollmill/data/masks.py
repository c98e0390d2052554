"""Which part of a conversation the assistant wrote, found by rendering its beginnings.

A template is a program, so nothing is assumed about its marks. A turn begins where the rendering of
the messages before it, generation prompt included, ends: there the model takes over when it
answers. It ends behind its end-of-turn token. That is only true when the beginning of the
conversation, rendered by itself, is the beginning of the whole: a template for which it is not
(one that removes earlier thinking, say) is refused, with the turn and the text that differs.

Invariant: every marked span starts where the model would start to write and holds all that the
message says, and no character outside the spans is ever learned. Cost: two renderings of the
beginning per marked turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollmill.data.readers import BadRowError

Message = dict[str, Any]
Render = Callable[[int, bool], str]
"""`render(n, True)`: the first n messages as text, with the generation prompt behind them."""

EARLIER_TURNS = "learn each turn as it was when it was written: data.sft.turns: each, or last"
OWN_PROMPT = (
    "the template does not write answers as it asks for them, so they cannot be learned with it: "
    "mend the template, or set data.chat_template_kwargs"
)

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold what the assistant thought before it answered."""

_SHOWN_BEFORE, _SHOWN_AFTER = 30, 60


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text and the spans of it to learn.

    Attributes:
        text: up to the end of the last span; what follows it cannot matter.
        spans: (start, end) in characters, ascending, not empty.
        is_open: the template put no end-of-turn token behind the last span; the end of sequence
            belongs there.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    is_open: bool


class TurnMarker:
    """Marks assistant turns in rendered conversations.

    Args:
        special_tokens: texts of the tokenizer's special tokens, among them that of a turn's end.
    """

    def __init__(self, special_tokens: Iterable[str]) -> None:
        longest_first = sorted({t for t in special_tokens if t}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def mark(self, messages: Sequence[Message], turns: Sequence[int], render: Render) -> MarkedText:
        """The conversation as text, with the spans of `turns`.

        Args:
            messages: the whole conversation.
            turns: places of the messages to learn, ascending, at least one.
            render: of `messages`.

        Raises:
            BadRowError: a turn's place cannot be told; the text says which and why.
        """
        text = render(len(messages), False)
        spans: list[tuple[int, int]] = []
        is_open = False
        for turn in turns:
            if is_open:
                raise BadRowError(
                    f"{_name(turns[len(spans) - 1], messages)}: the template writes no end-of-turn "
                    "token behind it, so the model would not learn to stop (learn one turn per "
                    "sample: data.sft.turns: last or each)"
                )
            start = _start(text, turn, messages, render)
            is_last = turn == len(messages) - 1
            rendered = text if is_last else render(turn + 1, False)
            end, is_open = self._end(rendered, start, turn, messages, render)
            _check_beginning(text, rendered[:end], _name(turn, messages), EARLIER_TURNS)
            _check_said(turn, messages, rendered[:end], start, render)
            if messages[turn].get("content"):
                _check_header(rendered[start:end], turn, messages, render)
            spans.append((start, end))
        return MarkedText(text[: spans[-1][1]], tuple(spans), is_open)

    def _end(
        self, rendered: str, start: int, turn: int, messages: Sequence[Message], render: Render
    ) -> tuple[int, bool]:
        """Where the turn ends in `rendered`, and whether without an end-of-turn token."""
        if not rendered[start:].strip():
            raise BadRowError(f"{_name(turn, messages)}: the template writes nothing for it")
        marks = [match.span() for match in self._special.finditer(rendered, start)]
        if marks and not rendered[marks[-1][1] :].strip():
            return _end_of_turn(rendered, marks, lambda: render(turn + 1, True)), False
        return _end_of_content(rendered, messages[turn].get("content")), True


def _start(text: str, turn: int, messages: Sequence[Message], render: Render) -> int:
    if turn == 0:
        raise BadRowError("message 1 (assistant): a conversation cannot begin with the assistant")
    before = render(turn, True)
    advice = EARLIER_TURNS if turn < len(messages) - 1 else OWN_PROMPT
    _check_beginning(text, before, f"the generation prompt of {_name(turn, messages)}", advice)
    return len(before)


def _end_of_turn(rendered: str, marks: Sequence[tuple[int, int]], ask: Callable[[], str]) -> int:
    """The end of the last of the special tokens `marks`, unless several stand at the end.

    Some templates (Phi-3) put the end of sequence behind a conversation that is over, which is not
    there when the next answer is asked for (`ask`): no turn ends with it.
    """
    last = len(marks) - 1
    if last == 0 or rendered[marks[last - 1][1] : marks[last][0]].strip():
        return marks[last][1]
    asked = ask()
    while not asked.startswith(rendered[: marks[last][1]]):
        if last == 0 or rendered[marks[last - 1][1] : marks[last][0]].strip():
            return marks[-1][1]
        last -= 1
    return marks[last][1]


def _end_of_content(rendered: str, content: Any) -> int:
    """Where an answer ends that no token ends: behind its text, before the template's own space."""
    end = len(rendered.rstrip())
    own = content[len(content.rstrip()) :] if isinstance(content, str) else ""
    return end + len(own) if rendered.startswith(own, end) else end


def _check_beginning(text: str, beginning: str, what: str, advice: str) -> None:
    """The rendered beginning must be the beginning of the rendered whole."""
    if text.startswith(beginning):
        return
    place = next(
        (i for i, (a, b) in enumerate(zip(text, beginning, strict=False)) if a != b),
        min(len(text), len(beginning)),
    )
    raise BadRowError(
        f"{what}: the template changes the text when more follows: "
        f"{_around(beginning, place)} became {_around(text, place)} ({advice})"
    )


def _check_said(
    turn: int, messages: Sequence[Message], rendered: str, start: int, render: Render
) -> None:
    """Nothing of the message may be missing: a template leaves out what it does not know.

    What the generation prompt says already (that thinking begins) is not missing.
    """
    said = list(_said(messages[turn]))
    if not any(text.strip() for _, text in said):
        raise BadRowError(
            f"{_name(turn, messages)}: it has no text and no tool call, so the model would learn "
            "to end at once (take it out, or out of the loss with step_loss_mask: 0)"
        )
    for part, text in said:
        if text.strip() in rendered[start:]:
            continue
        missing = _missing_word(text, rendered[start:])
        if missing is not None:
            header = min(start, len(render(turn, False)))
            missing = _missing_word(text, rendered[header:])
        if missing is not None:
            raise BadRowError(
                f"{_name(turn, messages)}: the template leaves out its {part}, so that would not "
                f"be learned: {_around(text, missing)} (use a template that writes it, or take it "
                "out of the message)"
            )


def _missing_word(text: str, whole: str) -> int | None:
    """Where in `text` the first word is that does not come in its turn in `whole`; the space
    between words may differ."""
    place = 0
    for word in re.finditer(r"\S+", text):
        place = whole.find(word[0], place)
        if place < 0:
            return word.start()
        place += len(word[0])
    return None


def _said(message: Message) -> Iterator[tuple[str, str]]:
    """(what it is, text) of all that a message has to say."""
    content = message.get("content")
    if isinstance(content, str):
        yield "content", content
    for entry in content if isinstance(content, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("text"), str):
            yield "content", entry["text"]
    for key in THOUGHTS:
        if isinstance(message.get(key), str):
            yield key, message[key]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield "tool_calls", function["name"]


def _check_header(answer: str, turn: int, messages: Sequence[Message], render: Render) -> None:
    """A template without a generation prompt must not hide a header in the assistant's span."""
    content = messages[turn]["content"]
    words = content.split() if isinstance(content, str) else []
    if not words or answer.lstrip().startswith(words[0]):
        return
    if render(turn, True) == render(turn, False):
        raise BadRowError(
            f"{_name(turn, messages)}: the template has no generation prompt and writes "
            f"{_around(answer, 0)} where the answer {_around(content, 0)} should begin, so the "
            "model would learn to write the header"
        )


def _name(turn: int, messages: Sequence[Message]) -> str:
    return f"message {turn + 1} ({messages[turn]['role']})"


def _around(text: str, place: int) -> str:
    start, end = max(0, place - _SHOWN_BEFORE), place + _SHOWN_AFTER
    return repr(("…" if start else "") + text[start:end] + ("…" if end < len(text) else ""))
