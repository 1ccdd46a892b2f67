"""Turns a conversation into tokens, and says which of them are to be learnt: the assistant's answers.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    {"prompt": "2 + 2 = ", "completion": "4"}

Messages are written as the tokenizer's own chat template writes them. An answer is what the template adds to the text
before it, which ends with the prompt for an answer; so its end-of-turn token is learnt as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from shardwise.errors import ConfigError
from shardwise.train.documents import valid_text
from shardwise.train.tokenizers import BYTES, load_hugging_face_tokenizer

__all__ = ["Conversation", "conversation_reader"]

Conversation = list[int]
"""Tokens; those that are not to be learnt as their complement ``~token``, which is negative."""

_MESSAGES = "messages"
_END_OF_BYTES = 0
_EXAMPLE = 'write {"messages": [{"role": "user", "content": "..."}, ...]}'

Message = dict[str, Any]


class _ChatTokenizer(Protocol):
    end: int | None

    def encode(self, text: str) -> Sequence[int]: ...

    def encode_with_places(self, text: str) -> Iterable[tuple[int, tuple[int, int]]]:
        """Yields tokens, and the characters that each stands for: from a place in the text to another."""

    def render(self, messages: Sequence[Message], asks: bool, where: str) -> str:
        """Writes messages as a text, with the prompt for an answer after them if it ``asks`` for one."""


def conversation_reader(
    tokenizer_name: str, *, learns_all: bool
) -> Callable[[dict[str, Any], str], Conversation]:
    """Returns a function from a row, and where it was found, to its conversation's tokens; none without an answer."""
    tokenizer: _ChatTokenizer = _Bytes() if tokenizer_name == BYTES else _Template(tokenizer_name)

    def read(row: dict[str, Any], where: str) -> Conversation:
        if _MESSAGES in row:
            tokens = _of_messages(row[_MESSAGES], tokenizer, where)
        elif "prompt" in row and "completion" in row:
            tokens = _of_completion(row["prompt"], row["completion"], tokenizer, where)
        else:
            raise ConfigError(
                f"it has neither messages nor prompt and completion, but {', '.join(map(str, row)) or 'nothing'}",
                where=where,
                fix=_EXAMPLE,
            )
        return [max(token, ~token) for token in tokens] if learns_all else tokens

    return read


def _of_completion(prompt: Any, completion: Any, tokenizer: _ChatTokenizer, where: str) -> Conversation:
    if prompt is None or completion is None:
        return []
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str):
            raise ConfigError(f"its {name} is no text, but {value!r:.60}", where=where, fix=_EXAMPLE)
    end = [] if tokenizer.end is None else [tokenizer.end]
    masked = [~token for token in tokenizer.encode(valid_text(prompt))]
    return [*masked, *tokenizer.encode(valid_text(completion)), *end]


def _of_messages(messages: Any, tokenizer: _ChatTokenizer, where: str) -> Conversation:
    if messages is None:
        return []
    if not isinstance(messages, list) or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and "content" in each
        for each in messages
    ):
        raise ConfigError("messages is no list of roles and contents", where=where, fix=_EXAMPLE)
    text, is_learnt = "", bytearray()
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = valid_text(tokenizer.render(messages[:number], True, where))
        after = valid_text(tokenizer.render(messages[: number + 1], False, where))
        if not (after.startswith(before) and before.startswith(text)):
            raise ConfigError(
                f"the chat template writes message {number} differently once others follow it, so that the tokens of "
                "an answer are not known",
                where=where,
                fix="use a template that only adds to the text, or one answer per conversation",
            )
        is_learnt += bytes(len(before) - len(text)) + b"\1" * (len(after) - len(before))
        text = after
    # A token that begins in the prompt and ends in the answer is learnt: otherwise the answer's beginning is not.
    return [
        token if any(is_learnt[start:end]) else ~token
        for token, (start, end) in tokenizer.encode_with_places(text)
    ]


class _Bytes:
    """Writes ``role: content`` and a byte 0 for each message, and ``assistant: `` to ask for an answer."""

    end: int | None = _END_OF_BYTES

    def encode(self, text: str) -> Sequence[int]:
        return text.encode()

    def encode_with_places(self, text: str) -> Iterable[tuple[int, tuple[int, int]]]:
        for place, character in enumerate(text):
            for byte in character.encode():
                yield byte, (place, place + 1)

    def render(self, messages: Sequence[Message], asks: bool, where: str) -> str:
        for number, message in enumerate(messages):
            if not isinstance(message["content"], str):
                raise ConfigError(
                    f"the content of message {number} is no text, but {message['content']!r:.60}",
                    where=where,
                    fix="write a text, or use a tokenizer with a chat template that knows such contents",
                )
        written = [f"{message['role']}: {message['content']}{chr(_END_OF_BYTES)}" for message in messages]
        return "".join([*written, "assistant: "] if asks else written)


class _Template:
    """The chat template of a Hugging Face tokenizer."""

    def __init__(self, name: str) -> None:
        self._name, self._tokenizer = name, load_hugging_face_tokenizer(name)
        self.end: int | None = self._tokenizer.eos_token_id

    def encode(self, text: str) -> Sequence[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def encode_with_places(self, text: str) -> Iterable[tuple[int, tuple[int, int]]]:
        if not self._tokenizer.is_fast:
            raise ConfigError(
                f"the tokenizer '{self._name}' does not say where in a text its tokens are",
                where="data.format=chat",
                fix="use its fast version, which has a tokenizer.json, or rows with prompt and completion",
            )
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return zip(found["input_ids"], found["offset_mapping"], strict=True)

    def render(self, messages: Sequence[Message], asks: bool, where: str) -> str:
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer '{self._name}' has no chat template",
                where="data.format=chat",
                fix="use a tokenizer of a chat model, or rows with prompt and completion",
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=asks, tokenize=False
            )
        except Exception as error:  # noqa: BLE001  templates are code, and refuse conversations by raising
            raise ConfigError(
                f"the chat template of '{self._name}' refuses it: {type(error).__name__}: {error}",
                where=where,
                fix="write the conversation as the template expects it, or leave it out",
            ) from None
        return text
