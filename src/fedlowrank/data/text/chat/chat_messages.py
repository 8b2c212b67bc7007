"""Turns of conversations: from rows in the forms of OpenAI and ShareGPT to those that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ....core.errors import DataError
from ..table import explain_json_error, explain_surrogate, find_lone_surrogate
from ..text_records import ChatMessage

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""Roles of a chat template for the speakers of ShareGPT's ``from``."""


def read_messages(value: object, location: str, column: str) -> tuple[ChatMessage, ...]:
    """The turns of a row in the form of OpenAI or of ShareGPT.

    Values that are null are left out, because Arrow files fill in every key that some row has. A content that
    is null beside ``tool_calls`` is empty text. Parts of type ``text`` are joined. Other keys stay, for the chat
    template; ``weight`` and ``train`` say whether a turn is learnt (:func:`is_learnt`).

    Args:
        value: a list of ``{"role": ..., "content": ...}``, or of ``{"from": ..., "value": ...}``; a turn may also have
            the other form's key of the text.
        location: file and row, for messages.
        column: where the value is from, for messages.

    Raises:
        DataError: if a turn has no role, neither a text nor calls of tools, or two texts; if a role of ShareGPT is
            unknown, a content is no text, or a mark is none.
    """
    column_location = f"{location}: {column!r}"
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise DataError(f"{column_location} must be a list of at least one message, not {_shorten(value)}.")
    return tuple(_read_message(message, f"{column_location}, turn {n}") for n, message in enumerate(value, 1))


def is_message_list(value: object) -> bool:
    """Whether a value is a list of messages, not a text."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def read_tools(value: object, location: str) -> tuple[Any, ...]:
    """The JSON schemas of tools: a list, a list as JSON text, or nothing.

    Raises:
        DataError: if it is something else.
    """
    if value is None or value == "":
        return ()
    tools: object = value
    if isinstance(value, str):
        try:
            tools = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{location}: 'tools' {explain_json_error(value, error)}") from error
        if surrogate := find_lone_surrogate(tools):
            raise DataError(explain_surrogate(f"{location}: 'tools'", surrogate))
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise DataError(f"{location}: 'tools' must be a list of JSON schemas, not {_shorten(tools)}.")
    return tuple(_remove_nulls(tool) for tool in tools)


def is_learnt(message: ChatMessage) -> bool:
    """Whether a turn of the assistant is to be learnt: its ``weight`` (OpenAI) is not 0, nor its ``train`` (Axolotl) false."""
    return bool(message.get("weight", 1)) and bool(message.get("train", True))


def is_blank(message: ChatMessage) -> bool:
    """Whether a turn has neither text nor calls of tools, so that nothing is learnt from it but to end at once."""
    return not message["content"].strip() and not message.get("tool_calls")


def merge_system(messages: Sequence[ChatMessage], location: str) -> tuple[ChatMessage, ...]:
    """Put the system's text before the first user's text, separated by a blank line.

    Raises:
        DataError: if no turn of a user follows the system's.
    """
    if not messages or messages[0]["role"] != "system":
        return tuple(messages)
    if len(messages) < 2 or messages[1]["role"] != "user":
        raise DataError(
            f"{location}: the system's turn cannot be merged: no turn of a user follows it. Drop the row, or set "
            "system to 'template'."
        )
    text = f"{messages[0]['content']}\n\n{messages[1]['content']}"
    return ({**messages[1], "content": text}, *messages[2:])


def drop_oldest_exchange(
    messages: Sequence[ChatMessage], max_turns: int | None = None
) -> tuple[ChatMessage, ...] | None:
    """Leave out the turns from the first one after the system's up to the next turn of a user.

    Args:
        messages: the turns.
        max_turns: only of so many first turns some may be left out; None for no limit.

    Returns:
        The shorter conversation; None if no later turn of a user is followed by the assistant's.
    """
    start = int(messages[0]["role"] == "system") if messages else 0
    stop = len(messages) if max_turns is None else min(len(messages), max_turns + 1)
    for k in range(start + 1, stop):
        is_answered = any(message["role"] == "assistant" for message in messages[k:])
        if messages[k]["role"] == "user" and is_answered:
            return (*messages[:start], *messages[k:])
    return None


def _read_message(message: object, location: str) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise DataError(f"{location} must be an object with 'role' and 'content', not {_shorten(message)}.")
    fields = _remove_nulls(message)
    if "role" in fields:
        role, role_key, content_keys = fields["role"], "role", ("content", "value")
    elif "from" in fields:
        speaker, role_key, content_keys = fields["from"], "from", ("value", "content")
        if not isinstance(speaker, str):
            raise DataError(f"{location}: 'from' must be text, not {_shorten(speaker)}.")
        if speaker not in SHAREGPT_ROLES:
            raise DataError(
                f"{location} is from {speaker!r}, which is none of {', '.join(SHAREGPT_ROLES)}. Rename it, or "
                "write the row as messages with 'role' and 'content'."
            )
        role = SHAREGPT_ROLES[speaker]
    else:
        keys = ", ".join(map(repr, message)) or "nothing"
        raise DataError(f"{location} has no 'role' (or 'from'); it has {keys}.")
    if not isinstance(role, str):
        raise DataError(f"{location}: 'role' must be text, not {_shorten(role)}.")
    content_key = next((key for key in content_keys if key in fields), content_keys[0])
    if content_key not in fields and not fields.get("tool_calls"):
        keys = ", ".join(repr(key) for key in fields if key != role_key) or "nothing else"
        raise DataError(
            f"{location}, of the {role}, has no {content_key!r} and no 'tool_calls'; it has {keys}. Fill it in, or drop the row."
        )
    extra_fields = {key: value for key, value in fields.items() if key not in (role_key, content_key)}
    if "content" in extra_fields:
        raise DataError(f"{location} has two texts, in 'value' and in 'content'. Drop one of them.")
    _check_marks(role, extra_fields, location)
    content = _read_content(fields.get(content_key, ""), content_key, location)
    return {"role": role, "content": content, **extra_fields}


def _check_marks(role: str, keys: Mapping[str, Any], location: str) -> None:
    """Refuse marks of what is learnt that are neither yes nor no, or mark a turn that is never learnt."""
    weight, train = keys.get("weight", 1), keys.get("train", False)
    if weight not in (0, 1):
        raise DataError(f"{location}: 'weight' is {_shorten(weight)}; it is 1 for a turn to learn, or 0.")
    if not isinstance(train, bool):
        raise DataError(
            f"{location}: 'train' is {_shorten(train)}; it is true for a turn to learn, or false."
        )
    if train and role != "assistant":
        raise DataError(
            f"{location} has 'train': true, but turns of the {role} are not learnt. Drop the key."
        )


def _read_content(content: object, key: str, location: str) -> str:
    if isinstance(content, str):
        return content
    parts = list(content) if isinstance(content, Sequence) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if len(texts) == len(parts) and all(isinstance(text, str) for text in texts):
        return "".join(map(str, texts))
    raise DataError(
        f"{location}: {key!r} must be text, or a list of parts of type 'text', not {_shorten(content)}. Images "
        "and sound are not supported."
    )


def _remove_nulls(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {key: _remove_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_remove_nulls(item) for item in value]
    return value


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
