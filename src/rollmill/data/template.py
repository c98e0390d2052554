"""From a prompt to token ids, by the tokenizer's own chat template.

The one place where text becomes prompt tokens. A rendered template is tokenized without further
special tokens, because the template writes them itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from rollmill.config.data import DatasetConfig
from rollmill.data.prompts import Prompt, RowFields
from rollmill.data.readers import BadRowError, refuse_lone_surrogates
from rollmill.errors import DataError, ModelError
from rollmill.sample import IntArray, int_array


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    chat_template: Any

    def __call__(self, text: list[str], **kwargs: Any) -> Any:
        """A mapping whose `input_ids` holds the token ids of each text."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any:
        """A conversation as text (with `tokenize=False`)."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> Any:
        """Token ids as text."""


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The transformers tokenizer in the folder `path`; never from the network.

    Raises:
        ModelError: no tokenizer can be loaded from there.
    """
    from transformers import AutoTokenizer

    if not Path(path).is_dir():  # transformers would take it for a name to download
        raise ModelError(
            "the tokenizer's folder does not exist",
            where="model.tokenizer",
            expected="a folder with tokenizer.json and tokenizer_config.json",
            found=str(path),
            fix="check the path (from the current directory), or leave it out to take the model's",
        )
    try:
        return AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            "the tokenizer cannot be loaded",
            where=str(path),
            expected="a folder with tokenizer.json and tokenizer_config.json",
            found=f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}",
            fix="copy the tokenizer's files again, or set model.tokenizer to a tokenizer's folder",
        ) from error


class PromptRenderer:
    """Turns the fields of rows into prompt text, and texts into token ids.

    Raises:
        DataError: the tokenizer has no chat template and the configuration asks for one.
    """

    def __init__(self, config: DatasetConfig, tokenizer: Tokenizer) -> None:
        if config.apply_chat_template and not tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template",
                where="data.apply_chat_template",
                expected="a chat model, or prompts as plain text",
                found="true, with a tokenizer whose chat_template is empty",
                fix="set apply_chat_template: false, or use the instruction-tuned model",
            )
        self._config = config
        self._tokenizer = tokenizer

    def text(self, fields: RowFields) -> str:
        """The whole prompt as the model will see it.

        Raises:
            BadRowError: the template refuses the row, or its text is not Unicode.
        """
        refuse_lone_surrogates(fields.prompt)
        if not self._config.apply_chat_template:
            return str(fields.prompt)
        return self._from_template(fields)

    def tokens(self, texts: list[str]) -> list[IntArray]:
        """Token ids (int32 [P]) of each text. Many at once are faster: they share the cores.

        Rendered chats get no further special tokens, plain text those the tokenizer adds itself.
        """
        if not texts:
            return []
        special = not self._config.apply_chat_template
        encoded = self._tokenizer(texts, add_special_tokens=special, verbose=False)
        return [int_array(ids) for ids in encoded["input_ids"]]

    def _from_template(self, fields: RowFields) -> str:
        messages = conversation(fields.prompt, self._config)
        options: dict[str, Any] = {"add_generation_prompt": True}
        options |= self._config.chat_template_kwargs
        if options.get("continue_final_message"):
            options["add_generation_prompt"] = False
        return render_chat(self._tokenizer, messages, tools=fields.tools, **options)


def render_chat(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
    """Messages as text, by the tokenizer's chat template with `options`.

    Raises:
        BadRowError: the template refuses them.
        DataError: it is no template.
    """
    import jinja2

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except jinja2.TemplateSyntaxError as error:  # no row is at fault
        raise DataError(
            "the tokenizer's chat template is not valid",
            where="chat_template.jinja, or chat_template in tokenizer_config.json",
            expected="a Jinja template",
            found=f"{error.message} (line {error.lineno})",
            fix="copy the tokenizer's files again, or set data.apply_chat_template: false",
        ) from error
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        # Templates are programs that come with the model: they raise what they like.
        raise BadRowError(f"the chat template refuses the messages: {error}") from error


def conversation(prompt: Prompt, config: DatasetConfig) -> list[dict[str, Any]]:
    """`prompt` as messages, headed by the configured system message.

    Text becomes one user message. A system message in the row itself wins. An empty configured
    one is still a message: templates that insert a default when there is none then do not.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if config.system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": config.system_prompt}, *messages]
