"""Turns a conversation into tokens, and says which of them are to be learnt: the assistant's answers.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    {"prompt": "2 + 2 = ", "completion": "4"}

Messages are written as the tokenizer's own chat template writes them. An answer is what the template adds to the
conversation before it, with the prompt for an answer included in that; so its end-of-turn token is learnt as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwise.errors import ConfigError
from shardwise.train.optional_packages import require

__all__ = ["Conversation", "conversation_reader"]

Conversation = list[int]
"""Tokens; those that are not to be learnt as their complement ``~token``, which is negative."""

_END_OF_BYTES = 0
_MESSAGES = "messages"


def conversation_reader(
    tokenizer_name: str, *, learns_all: bool
) -> Callable[[dict[str, Any], str], Conversation]:
    """Returns a function from a row, and where it was found, to its conversation's tokens."""
    if tokenizer_name == "bytes":
        encode, render, end = _bytes_of, _render_bytes, _END_OF_BYTES
    else:
        transformers = require("transformers", f"the tokenizer '{tokenizer_name}'")
        tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_name)
        end = tokenizer.eos_token_id

        def encode(text: str) -> list[int]:
            tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return tokens

        def render(messages: Sequence[dict[str, Any]], prompts: bool) -> list[int]:
            if not tokenizer.chat_template:
                raise ConfigError(
                    f"the tokenizer '{tokenizer_name}' has no chat template",
                    where="data.format=chat",
                    fix="use a tokenizer of a chat model, or rows with prompt and completion",
                )
            tokens: list[int] = tokenizer.apply_chat_template(
                messages, add_generation_prompt=prompts, tokenize=True, return_dict=False
            )
            return tokens

    def read(row: dict[str, Any], where: str) -> Conversation:
        if _MESSAGES in row:
            tokens = _of_messages(row[_MESSAGES], render, where)
        elif "prompt" in row and "completion" in row:
            answer = [*encode(row["completion"]), *([] if end is None else [end])]
            tokens = [*(~token for token in encode(row["prompt"])), *answer]
        else:
            raise ConfigError(
                f"it has neither messages nor prompt and completion, but {', '.join(map(str, row)) or 'nothing'}",
                where=where,
                fix='write {"messages": [{"role": "user", "content": "..."}, ...]}',
            )
        return [max(token, ~token) for token in tokens] if learns_all else tokens

    return read


def _of_messages(
    messages: Any, render: Callable[[Sequence[dict[str, Any]], bool], list[int]], where: str
) -> Conversation:
    if not isinstance(messages, list) or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and "content" in each
        for each in messages
    ):
        raise ConfigError(
            "messages is no list of roles and contents",
            where=where,
            fix='write {"messages": [{"role": "user", "content": "..."}, ...]}',
        )
    tokens: list[int] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:number], True)
        after = render(messages[: number + 1], False)
        plain = [max(token, ~token) for token in tokens]
        if after[: len(before)] != before or before[: len(plain)] != plain:
            raise ConfigError(
                f"the chat template writes message {number} differently once others follow it, so that the tokens of "
                "an answer are not known",
                where=where,
                fix="use a template that only adds to the text, or one answer per conversation",
            )
        tokens += [~token for token in before[len(plain) :]]
        tokens += after[len(before) :]
    return tokens


# --- bytes ----------------------------------------------------------------------------------------------------------


def _bytes_of(text: str) -> list[int]:
    return list(text.encode())


def _render_bytes(messages: Sequence[dict[str, Any]], prompts: bool) -> list[int]:
    """Writes ``role: content`` and a byte 0 for each message, and ``assistant: `` to ask for an answer."""
    tokens = []
    for message in messages:
        tokens += [*_bytes_of(f"{message['role']}: {message['content']}"), _END_OF_BYTES]
    return [*tokens, *_bytes_of("assistant: ")] if prompts else tokens
