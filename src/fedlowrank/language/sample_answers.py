"""Answers to a few fixed prompts before and after a run, so that people can read what changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ..core.tree import Params
from .chat_session import ChatSession
from .export.server_model import find_server_model
from .scores.generate import Decoding

if TYPE_CHECKING:
    from ..rounds.run import Run

MOST_CLIENTS = 4
"""Clients whose own models answer."""


def sample_answers(
    run: Run,
    prompts: Sequence[str],
    live: Callable[[Params], AbstractContextManager[Any]],
    tokenizer: Any,
    write_prompt: Callable[[str], str],
    tokens: int,
    by_template: bool = True,
) -> list[dict[str, Any]]:
    """The models' greedy answers to some prompts.

    Before the first round it is one model; later the server's, if there is one, and those of the first clients.

    Args:
        run: as it stands.
        prompts: the questions.
        live: the model with given parameters, as a context.
        tokenizer: of the model.
        write_prompt: writes a question in the format of training; used without a chat template.
        tokens: of an answer at most.
        by_template: whether a chat template of the tokenizer writes the prompts.

    Returns:
        A row for each model and prompt: ``round``, ``model``, ``prompt`` and ``answer``.
    """
    infos = run.federation.infos
    models: dict[str, Any] = {} if (server := find_server_model(run)) is None else {"server": server}
    if run.round == 0:
        models = {"start": run.personal(infos[0]) if server is None else server}
    else:
        models |= {f"client {info.id}": run.personal(info) for info in infos[:MOST_CLIENTS]}
    decoding = Decoding(max_new_tokens=tokens)
    found = []
    for name, params in models.items():
        with live(params) as module:
            for prompt in prompts:
                # a conversation of its own for each
                session = ChatSession(module, tokenizer, write_prompt, decoding, by_template)
                answer = session.reply(prompt)
                found.append({"round": run.round, "model": name, "prompt": prompt, "answer": answer})
    return found
