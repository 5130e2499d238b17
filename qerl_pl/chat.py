"""A row as a chat, rendered by the model's own template."""

import re
from datetime import datetime
from typing import Any

from jinja2 import TemplateError

from qerl_pl.types import Prompt
from registry.rewards import AnswerFormat

DATE = datetime(2024, 7, 26)
"""What templates that print today's date (Llama 3.1 and later) are told: a prompt must be the same tomorrow. It is the
date that those of Llama fall back on."""

OURS = {"conversation", "messages", "tokenize", "add_generation_prompt", "return_dict", "return_tensors"}


def _merged(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The system message at the head of the first user message."""
    system, *others = messages
    if others and others[0]["role"] == "user":
        return [others[0] | {"content": f"{system['content']}\n\n{others[0]['content']}"}, *others[1:]]
    return [{"role": "user", "content": system["content"]}, *others]


class Chat:
    """Renders rows: the format's system prompt (unless a row brings one), the row's messages, the start of an answer.

    Args:
        tokenizer: the model's, with a chat template.
        answer_format: whose system prompt is given; none if that is empty (a template may then give its own).
        template_args: what else the template takes, such as ``{enable_thinking: false}``.

    Raises:
        ValueError: if there is no template, or if it knows no such argument.
    """

    def __init__(
        self, tokenizer: Any, answer_format: AnswerFormat, template_args: dict[str, Any] | None = None
    ) -> None:
        if tokenizer.chat_template is None:
            raise ValueError(
                "the model has no chat template; name an instruct model, or add chat_template.jinja to its folder"
            )
        self.tokenizer, self.answer_format = tokenizer, answer_format
        self.args = {"strftime_now": DATE.strftime} | (template_args or {})
        template = tokenizer.get_chat_template()
        for name in template_args or {}:
            if name in OURS or not re.search(rf"\b{re.escape(name)}\b", template):
                raise ValueError(
                    f"chat_template_args: the chat template of the model takes no {name!r}; remove it, or correct its "
                    "name (Qwen3 takes enable_thinking, Llama 3.1 date_string)"
                )
        self.merges = False
        """Whether the template refused a system message, so that its text stands in the first user message."""

    def messages(self, row: dict[str, Any]) -> list[dict[str, str]]:
        """The messages of a row, the system prompt among them."""
        content = row["prompt"]
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        system = self.answer_format.system_prompt
        if system.strip() and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        return messages

    def __call__(self, row: dict[str, Any]) -> Prompt:
        messages = self.messages(row)
        try:
            text = self._apply(_merged(messages) if self.merges and messages[0]["role"] == "system" else messages)
        except TemplateError as error:
            if self.merges or messages[0]["role"] != "system":
                raise self._refusal(messages, error) from None
            try:
                text = self._apply(_merged(messages))
            except TemplateError:
                raise self._refusal(messages, error) from None
            self.merges = True
        # The template writes the start token where there is one; the tokenizer must not write another.
        token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Prompt(list(token_ids), text, {k: v for k, v in row.items() if k != "prompt"})

    def _apply(self, messages: list[dict[str, str]]) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **self.args
        )
        return text

    @staticmethod
    def _refusal(messages: list[dict[str, str]], error: TemplateError) -> ValueError:
        roles = ", ".join(message["role"] for message in messages)
        return ValueError(f"the chat template of the model refuses messages of {roles}: {error}; mend the data")
