"""A row with recorded answers, as marked texts: what is there, and which of it is to be learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollmill.config.data import DatasetConfig
from rollmill.config.sft import SftConfig
from rollmill.data.masks import MarkedText, Message, TurnMarker
from rollmill.data.prompts import (
    from_json_text,
    read_message,
    read_metadata,
    read_tools,
    required_field,
)
from rollmill.data.readers import BadRowError, refuse_lone_surrogates
from rollmill.data.template import Tokenizer, conversation, render_chat
from rollmill.errors import DataError

LOSS_MASK_KEY = "step_loss_mask"
"""Key of a message that takes it into the loss (1) or out of it (0)."""
ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Conversation:
    """The checked fields of a row.

    Attributes:
        messages: with the configured system message, without keys of ours.
        turns: places of the messages to learn, ascending, at least one.
        tools: schemas for the template.
        metadata: the row's.
    """

    messages: list[Message]
    turns: tuple[int, ...]
    tools: list[dict[str, Any]] | None
    metadata: dict[str, Any]


class ConversationReader:
    """Turns rows into marked texts, as `data` and `data.sft` say.

    Args:
        config: the `data` section.
        sft: its `sft` section.
        tokenizer: the model's.

    Raises:
        DataError: the tokenizer has no chat template and the configuration asks for one.
    """

    def __init__(self, config: DatasetConfig, sft: SftConfig, tokenizer: Tokenizer) -> None:
        if config.apply_chat_template and not tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template",
                where="data.apply_chat_template",
                expected="a chat model, or rows of plain text with data.sft.response_key",
                found="true, with a tokenizer whose chat_template is empty",
                fix="put a chat template into the tokenizer's folder",
            )
        self._config = config
        self._sft = sft
        self._tokenizer = tokenizer
        self._marker = TurnMarker(special_tokens_of(tokenizer))

    def read(self, record: dict[str, Any]) -> tuple[list[MarkedText], dict[str, Any]]:
        """The texts of a row's samples, and its metadata.

        Raises:
            BadRowError: a field is missing or wrong, or a turn's place cannot be told.
        """
        if self._config.images_key and record.get(self._config.images_key):
            raise BadRowError("it has images: recorded answers about images cannot be learned yet")
        if not self._config.apply_chat_template:
            return [self._plain_text(record)], read_metadata(record, self._config.metadata_key)
        row = self._conversation(record)
        return [self._marked(row, *part) for part in self._parts(row)], row.metadata

    def _parts(self, row: Conversation) -> Iterator[tuple[list[Message], Sequence[int]]]:
        """What becomes one sample each: messages, and the turns of them to learn."""
        if self._sft.turns == "all" and self._sft.response_key is None:
            yield row.messages, row.turns
            return
        for turn in row.turns if self._sft.turns == "each" else row.turns[-1:]:
            yield row.messages[: turn + 1], [turn]

    def _marked(
        self, row: Conversation, messages: list[Message], turns: Sequence[int]
    ) -> MarkedText:
        def render(count: int, with_generation_prompt: bool) -> str:
            return render_chat(
                self._tokenizer,
                messages[:count],
                tools=row.tools,
                add_generation_prompt=with_generation_prompt,
                **self._config.chat_template_kwargs,
            )

        return self._marker.mark(messages, turns, render)

    def _conversation(self, record: dict[str, Any]) -> Conversation:
        messages = self._messages(record)
        refuse_lone_surrogates(messages)
        messages = conversation(messages, self._config)
        flags = [_is_learned(message, number) for number, message in enumerate(messages, start=1)]
        turns = tuple(number for number, is_learned in enumerate(flags) if is_learned)
        if self._sft.response_key is not None:
            turns = turns[-1:]
        if not turns:
            raise BadRowError(f"no turn to learn: {_roles(messages)}")
        return Conversation(
            messages=[_without_mask(message) for message in messages],
            turns=turns,
            tools=read_tools(record, self._config.tools_key),
            metadata=read_metadata(record, self._config.metadata_key),
        )

    def _messages(self, record: dict[str, Any]) -> list[Message]:
        if self._sft.response_key is None:
            value = from_json_text(
                required_field(record, self._sft.messages_key, "data.sft.messages_key"),
                "the conversation",
            )
            return _checked(value, "the conversation")
        prompt = required_field(record, self._config.prompt_key, "data.prompt_key")
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        response = {"role": ASSISTANT, "content": self._response(record)}
        return [*_checked(prompt, "the prompt"), response]

    def _response(self, record: dict[str, Any]) -> str:
        key = self._sft.response_key or ""
        response = required_field(record, key, "data.sft.response_key")
        if not isinstance(response, str) or not response.strip():
            raise BadRowError(f"the response must be text, found {response!r:.40}")
        return response

    def _plain_text(self, record: dict[str, Any]) -> MarkedText:
        prompt = required_field(record, self._config.prompt_key, "data.prompt_key")
        if not isinstance(prompt, str) or not prompt:
            raise BadRowError(
                f"the prompt must be text with apply_chat_template: false, found {prompt!r:.40}"
            )
        response = self._response(record)
        refuse_lone_surrogates([prompt, response])
        ending = getattr(self._tokenizer, "eos_token", None)
        is_open = not (ending and response.endswith(ending))
        text = prompt + response
        return MarkedText(text, ((len(prompt), len(text)),), is_open)


def special_tokens_of(tokenizer: Any) -> set[str]:
    """Texts of the tokens that are no text of anybody: ends of turns, roles, padding."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)


def _checked(value: Any, what: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise BadRowError(f"{what} must be a list of messages, found {value!r:.40}")
    return [read_message(entry, number) for number, entry in enumerate(value, start=1)]


def _is_learned(message: Message, number: int) -> bool:
    flag = message.get(LOSS_MASK_KEY)
    is_assistant: bool = message["role"] == ASSISTANT
    if flag is None:
        return is_assistant
    if flag not in (0, 1):
        raise BadRowError(f"message {number}: {LOSS_MASK_KEY} must be 0 or 1, found {flag!r:.40}")
    if flag and not is_assistant:
        raise BadRowError(
            f"message {number} ({message['role']}): {LOSS_MASK_KEY} is 1, but only the "
            "assistant's turns can be learned"
        )
    return bool(flag)


def _without_mask(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != LOSS_MASK_KEY}


def _roles(messages: Sequence[Message]) -> str:
    shown = [message["role"] for message in messages[:8]]
    return "its messages are " + ", ".join(shown) + (" …" if len(messages) > 8 else "")
