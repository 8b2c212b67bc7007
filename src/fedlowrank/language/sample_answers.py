"""Generates answers to a few fixed prompts before and after a run, for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ..core.tree import Params
from .chat_session import ChatSession
from .export.server_model import find_server_model
from .scores.text_generation import Decoding

if TYPE_CHECKING:
    from ..rounds.run import Run

MAX_ANSWERING_CLIENTS = 4
"""Maximum number of clients whose models answer."""


def sample_answers(
    run: Run,
    prompts: Sequence[str],
    use_parameters: Callable[[Params], AbstractContextManager[Any]],
    tokenizer: Any,
    write_prompt: Callable[[str], str],
    tokens: int,
    by_template: bool = True,
) -> list[dict[str, Any]]:
    """Generate the greedy answers of a run's models to some prompts.

    Before the first round one model answers. Later the server's model answers, if there is one, and the models of the
    first clients.

    Args:
        run: run in its current state.
        prompts: questions to answer.
        use_parameters: context manager that puts parameters into the model.
        tokenizer: tokenizer of the model.
        write_prompt: function that writes a question in the format of training; used without a chat template.
        tokens: maximum number of tokens of an answer.
        by_template: whether the chat template of the tokenizer writes the prompts.

    Returns:
        A row for each model and prompt: ``round``, ``model``, ``prompt`` and ``answer``.
    """
    infos = run.federation.infos
    models: dict[str, Any] = {} if (server := find_server_model(run)) is None else {"server": server}
    if run.round == 0:
        models = {"start": run.personal_params(infos[0]) if server is None else server}
    else:
        models |= {f"client {info.id}": run.personal_params(info) for info in infos[:MAX_ANSWERING_CLIENTS]}
    decoding = Decoding(max_new_tokens=tokens)
    rows = []
    for name, params in models.items():
        with use_parameters(params) as module:
            for prompt in prompts:
                # each prompt starts a new conversation
                session = ChatSession(module, tokenizer, write_prompt, decoding, by_template)
                answer = session.reply(prompt)
                rows.append({"round": run.round, "model": name, "prompt": prompt, "answer": answer})
    return rows
