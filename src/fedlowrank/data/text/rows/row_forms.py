"""Forms of rows: how people write instructions, conversations, preferences and labels into columns."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import takewhile
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from ....core.errors import DataError
from ..chat.chat_messages import is_blank, is_learnt, is_message_list, read_messages, read_tools
from ..on_disk.lazy_records import LazyRecords, RecentRows, list_facts
from ..table import Table
from ..text_records import (
    ChatMessage,
    Conversation,
    Instruction,
    Labeled,
    Preference,
    Record,
    TextPair,
    TokenLabeled,
    is_label,
)

Form: TypeAlias = Literal[
    "messages",
    "conversations",
    "prompt_completion",
    "alpaca",
    "preference",
    "text",
    "labels",
    "token_labels",
    "pairs",
]


_MARKS = frozenset({"true", "false", "0", "1", "0.0", "1.0"})
"""Values of a column ``label`` that tell good completions from bad ones, as lower-case text."""


class RowForm(NamedTuple):
    """A form of rows.

    Attributes:
        columns: the columns that a row has; of several in one place a row has one.
        optional: columns that a row may have.
        read: makes the record of row ``i`` of a table from category and client.
    """

    columns: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...]
    read: Callable[[Table, int, str | None, str | None], Record]

    def fits(self, columns: Collection[str]) -> bool:
        """Whether a table with these columns can have rows of this form."""
        return all(any(name in columns for name in names) for names in self.columns)

    def describe(self) -> str:
        """The columns in words."""
        return ", ".join(" or ".join(names) for names in self.columns)


def recognize_form(table: Table) -> Form:
    """The first form of :data:`FORMS` whose columns a table has.

    Raises:
        DataError: if there is none; the message lists the forms.
    """
    columns = _list_columns_with_values(table)
    for name, form in FORMS.items():
        if form.fits(columns):
            return name
    forms = "; ".join(f"{name}: {form.describe()}" for name, form in FORMS.items())
    raise DataError(
        f"{table.source!r} has the columns {', '.join(sorted(columns)) or 'none'}, which are of no known form. "
        f"Rename columns to one of these: {forms}. Or use source 'instructions', which takes any columns."
    )


def read_rows(
    table: Table,
    form: Form,
    category: str | None = None,
    client: str | None = None,
    on_disk: bool = False,
) -> tuple[Sequence[Record], int]:
    """The records of a table.

    Args:
        table: rows of the form.
        form: the form.
        category: column of categories, or None.
        client: column of natural clients, or None.
        on_disk: make each record at its access.

    Returns:
        The records that hold a text to learn, and the number of the others.

    Raises:
        DataError: if the table lacks a column, or a row does not fit; the message names file and row.
    """
    table.require(category, client)
    if category is not None and form in ("labels", "token_labels"):
        raise DataError(
            f"{table.source!r} has labels, by which partitions divide. Leave category_column {category!r} out."
        )
    columns, row_form = _list_columns_with_values(table), FORMS[form]
    for names in row_form.columns:
        if not any(name in columns for name in names):
            raise DataError(
                f"{table.source!r} has no column {' or '.join(map(repr, names))}, which rows of the form {form!r} "
                f"have. It has {', '.join(sorted(columns))}. Rename a column, or set another form."
            )

    # the first row whose prompt is text, and the first one whose prompt is a list of messages
    first_rows: dict[bool, int] = {}
    completion_marks: set[str] = set()

    def read_row(i: int) -> Record:
        # a value that is no mark is kept, and further values need not be
        if form == "prompt_completion" and completion_marks <= _MARKS:
            completion_marks.update(_read_mark(table.rows[i].get("label")))
        stratum = table.name(i, category)
        if category is not None and stratum is None:
            raise DataError(f"{table.locate(i)} has no {category!r}, which partitions use. Fill it in.")
        client_name = table.name(i, client)
        if client is not None and client_name is None:
            raise DataError(f"{table.locate(i)} names no client in {client!r}. Fill it in, or drop the row.")
        record = row_form.read(table, i, stratum, client_name)
        if _has_text(record):
            first_rows.setdefault(has_messages(record), i)
        if len(first_rows) > 1:
            raise DataError(explain_mixed_prompts(*(table.locate(first_rows[key]) for key in (False, True))))
        return record

    records: Sequence[Record]
    if on_disk:
        records, empty_count = _read_lazily(table, read_row)
    else:
        all_records = [read_row(i) for i in range(len(table.rows))]
        records = [record for record in all_records if _has_text(record)]
        empty_count = len(all_records) - len(records)
    if completion_marks and completion_marks <= _MARKS:
        raise DataError(
            f"{table.source!r} has a 'label' of {' and '.join(sorted(completion_marks))}, which tells good completions from bad "
            "ones, and all would be learnt. Keep the good rows and drop the column, or make pairs of 'chosen' and 'rejected'. "
            "If it means something else, rename the column."
        )
    return records, empty_count


def _read_mark(label: object) -> set[str]:
    """The mark of a completion in a row as lower-case text; empty for none."""
    text = "" if label is None else str(label).strip().lower()
    return {text} if text else set()


def _read_lazily(table: Table, read_row: Callable[[int], Record]) -> tuple[LazyRecords[Record], int]:
    """The records of a table that are made at every access, and the number of those without a text to learn."""
    rows, count = table.rows, len(table.rows)
    assert isinstance(rows, RecentRows)

    def read(numbers: np.ndarray) -> Iterator[Record]:
        return map(read_row, rows.visit(numbers))

    numbers = array("q")

    def select_learnable() -> Iterator[Record]:
        for i, record in enumerate(read(np.arange(count))):
            if _has_text(record):
                numbers.append(i)
                yield record

    facts = list_facts(select_learnable())
    return LazyRecords(read, np.array(numbers, np.int64), facts), count - len(numbers)


def has_messages(record: Record) -> bool:
    """Whether a record is a list of messages, or a preference pair of such."""
    return isinstance(record.chosen if isinstance(record, Preference) else record, Conversation)


def explain_mixed_prompts(text_location: str, message_location: str) -> str:
    """Explain that prompts are text at a location, and lists of messages at another."""
    return (
        f"prompts are text in some rows ({text_location}) and lists of messages in others ({message_location}). Convert "
        "them to lists of messages."
    )


def list_unread_columns(table: Table, form: Form, *other_columns: str | None) -> list[str]:
    """Columns of a table that the form and the other settings do not read, sorted."""
    row_form = FORMS[form]
    read_columns = {
        *row_form.optional,
        *other_columns,
        *(name for names in row_form.columns for name in names),
    }
    return sorted(_list_columns_with_values(table) - read_columns)


def _list_columns_with_values(table: Table) -> set[str]:
    table.require()
    return table.columns_with_values


def _has_text(record: Record) -> bool:
    if isinstance(record, Instruction):
        return bool(record.response.strip())
    if isinstance(record, Conversation):
        return not all(map(is_blank, _list_learnt_messages(record.messages[record.learn_from :])))
    if isinstance(record, Preference):
        return _has_text(record.chosen) and _has_text(record.rejected)
    if isinstance(record, TextPair):
        return bool(record.anchor.strip() and record.positive.strip())
    return bool(record.text.strip()) if isinstance(record, Labeled) else True


def _list_learnt_messages(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    return [message for message in messages if message["role"] == "assistant" and is_learnt(message)]


def _find_value(table: Table, i: int, names: tuple[str, ...]) -> tuple[Any, str]:
    """The value of the only one of these columns that row ``i`` has, and its column."""
    row = table.rows[i]
    filled_names = [name for name in names if row.get(name) is not None]
    if len(filled_names) != 1:
        filled_columns = (
            ", ".join(repr(name) for name, value in row.items() if value is not None) or "nothing"
        )
        choices = " or ".join(map(repr, names))
        problem = (
            f"needs one of {choices}, and has several"
            if filled_names
            else f"has no {choices}; it has {filled_columns}"
        )
        raise DataError(f"{table.locate(i)} {problem}. Fill it in, or drop the row.")
    return table.value(i, filled_names[0]), filled_names[0]


def _read_messages(table: Table, i: int, category: str | None, client: str | None) -> Conversation:
    value, column = _find_value(table, i, ("messages",))
    messages = read_messages(value, table.locate(i), column)
    return _make_conversation(table, i, messages, 0, category, client)


def _read_conversations(table: Table, i: int, category: str | None, client: str | None) -> Conversation:
    value, column = _find_value(table, i, ("conversations",))
    messages = read_messages(value, table.locate(i), column)
    system = table.text(i, "system", optional=True)
    if system and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": system}, *messages)
    return _make_conversation(table, i, messages, 0, category, client)


def _make_conversation(
    table: Table,
    i: int,
    messages: tuple[ChatMessage, ...],
    learn_from: int,
    category: str | None,
    client: str | None,
) -> Conversation:
    location = table.locate(i)
    if not _list_learnt_messages(messages[learn_from:]):
        raise DataError(f"{location} has no turn of the assistant to learn. Drop the row.")
    tools = read_tools(table.value(i, "tools"), location)
    return Conversation(messages, tools, learn_from, category, client, location)


def _read_completion(
    table: Table, i: int, category: str | None, client: str | None
) -> Instruction | Conversation:
    prompt, _ = _find_value(table, i, ("prompt",))
    completion, _ = _find_value(table, i, ("completion",))
    return _make_prompted(table, i, prompt, completion, "completion", category, client)


def _make_prompted(
    table: Table,
    i: int,
    prompt: Any,
    response: Any,
    column: str,
    category: str | None,
    client: str | None,
) -> Instruction | Conversation:
    """A prompt with a response, both texts or both lists of messages."""
    location = table.locate(i)
    if is_message_list(prompt) != is_message_list(response):
        raise DataError(
            f"{location}: 'prompt' and {column!r} must both be text, or both be lists of messages. Rewrite one of them."
        )
    if is_message_list(prompt):
        prompt_messages = read_messages(prompt, location, "prompt")
        response_messages = read_messages(response, location, column)
        return _make_conversation(
            table, i, (*prompt_messages, *response_messages), len(prompt_messages), category, client
        )
    for name, value in (("prompt", prompt), (column, response)):
        if not isinstance(value, str):
            raise DataError(f"{location}: {name!r} must be text or a list of messages, not {value!r}.")
    return Instruction(prompt, response, "", category, client)


def _read_alpaca(table: Table, i: int, category: str | None, client: str | None) -> Instruction:
    instruction, _ = _find_value(table, i, ("instruction",))
    for name in ("history", "system"):
        if table.rows[i].get(name):
            raise DataError(
                f"{table.locate(i)} has a {name!r}, which this form would lose. Convert the rows to 'messages'."
            )
    response, column = _find_value(table, i, ("output", "response"))
    for name, value in (("instruction", instruction), (column, response)):
        if not isinstance(value, str):
            raise DataError(f"{table.locate(i)}: {name!r} must be text, not {value!r}.")
    inputs = [table.text(i, name, optional=True) for name in ("input", "context")]
    if all(inputs):
        raise DataError(f"{table.locate(i)} has both 'input' and 'context'. Drop one of them.")
    return Instruction(instruction, response, "".join(inputs), category, client)


def _read_preference(table: Table, i: int, category: str | None, client: str | None) -> Preference:
    chosen, _ = _find_value(table, i, ("chosen",))
    rejected, _ = _find_value(table, i, ("rejected",))
    prompt, location = table.value(i, "prompt"), table.locate(i)
    if is_message_list(chosen) != is_message_list(rejected):
        raise DataError(
            f"{location}: 'chosen' and 'rejected' must both be text, or both be lists of messages. Rewrite one."
        )
    if is_message_list(chosen) and not is_message_list(prompt):
        prompt, chosen, rejected = _split_prompt(prompt, chosen, rejected, location)
    if prompt is None:
        raise DataError(
            f"{location} has no 'prompt', and 'chosen' and 'rejected' are text. Add a column 'prompt', or write "
            "lists of messages, whose common first turns are the prompt."
        )
    pair = [
        _make_prompted(table, i, prompt, response, column, category, client)
        for response, column in ((chosen, "chosen"), (rejected, "rejected"))
    ]
    return Preference(pair[0], pair[1], category, client)


def _split_prompt(
    prompt: Any, chosen: Any, rejected: Any, location: str
) -> tuple[Sequence[ChatMessage], Sequence[ChatMessage], Sequence[ChatMessage]]:
    """The turns of the prompt, and what follows them in two lists of messages.

    The prompt is what both lists begin with; a prompt as text before lists of answers alone is a turn of the user.
    """
    chosen_messages, rejected_messages = (
        read_messages(chosen, location, "chosen"),
        read_messages(rejected, location, "rejected"),
    )
    if (
        isinstance(prompt, str)
        and prompt
        and chosen_messages[0]["role"] == "assistant" == rejected_messages[0]["role"]
    ):
        return [{"role": "user", "content": prompt}], chosen_messages, rejected_messages
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(chosen_messages, rejected_messages, strict=False))
    common_turns = [turn for turn, _ in pairs]
    if not common_turns or len(common_turns) in (len(chosen_messages), len(rejected_messages)):
        problem = "begin with different turns" if not common_turns else "differ in no turn of the assistant"
        raise DataError(
            f"{location}: 'chosen' and 'rejected' {problem}, so there is no pair of responses to one prompt. Drop the "
            "row, or add a column 'prompt'."
        )
    return common_turns, chosen_messages[len(common_turns) :], rejected_messages[len(common_turns) :]


def _read_pair(table: Table, i: int, category: str | None, client: str | None) -> TextPair:
    texts = [_find_value(table, i, names) for names in (("anchor", "query"), ("positive", "document"))]
    for value, column in texts:
        if not isinstance(value, str):
            raise DataError(f"{table.locate(i)}: {column!r} must be text, not {value!r}.")
    return TextPair(texts[0][0], texts[1][0], category, client)


def _read_text(table: Table, i: int, category: str | None, client: str | None) -> Instruction:
    return Instruction("", table.text(i, "text"), "", category, client)


def _read_label(table: Table, i: int, _category: str | None, client: str | None) -> Labeled:
    label, _ = _find_value(table, i, ("label",))
    if not is_label(label):
        raise DataError(
            f"{table.locate(i)}: 'label' must be text or a whole number of 64 bits, not {label!r}."
        )
    return Labeled(table.text(i, "text"), label, client)


def _read_word_labels(table: Table, i: int, _category: str | None, client: str | None) -> TokenLabeled:
    words, _ = _find_value(table, i, ("tokens",))
    labels, column = _find_value(table, i, ("ner_tags", "labels", "tags"))
    location = table.locate(i)
    if not is_message_list(words) or not all(isinstance(word, str) for word in words) or not words:
        raise DataError(f"{location}: 'tokens' must be a list of words, not {words!r}.")
    has_valid_labels = is_message_list(labels) and all(map(is_label, labels))
    if not has_valid_labels or len(labels) != len(words):
        count = len(labels) if is_message_list(labels) else repr(labels)
        raise DataError(
            f"{location}: {column!r} must hold a name or whole number of 64 bits for each of the {len(words)} 'tokens'; it "
            f"holds {count}."
        )
    return TokenLabeled(tuple(words), tuple(labels), client, location)


FORMS: dict[Form, RowForm] = {
    "preference": RowForm((("chosen",), ("rejected",)), ("prompt", "tools"), _read_preference),
    "messages": RowForm((("messages",),), ("tools",), _read_messages),
    "conversations": RowForm((("conversations",),), ("system", "tools"), _read_conversations),
    "prompt_completion": RowForm((("prompt",), ("completion",)), ("tools",), _read_completion),
    "alpaca": RowForm((("instruction",), ("output", "response")), ("input", "context"), _read_alpaca),
    "token_labels": RowForm((("tokens",), ("ner_tags", "labels", "tags")), (), _read_word_labels),
    "pairs": RowForm((("anchor", "query"), ("positive", "document")), (), _read_pair),
    "labels": RowForm((("text",), ("label",)), (), _read_label),
    "text": RowForm((("text",),), (), _read_text),
}
"""The forms by name, in the order in which they are looked for."""
