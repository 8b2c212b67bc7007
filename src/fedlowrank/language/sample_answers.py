"""Generates answers to a few fixed prompts before and after a run, for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ..core.tree import Params
from .chat_session import ChatSession
from .export.client_models import find_single_models
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
    first clients. Clients that infer by a mixture of models (FedEM) are left out with a warning.

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
    is_start, server = run.round == 0, find_server_model(run)
    models: dict[str, Params] = {} if server is None else {"start" if is_start else "server": server}
    if not is_start or server is None:
        infos = run.federation.infos[: 1 if is_start else MAX_ANSWERING_CLIENTS]
        for info, params in find_single_models(run, infos, "answers"):
            models["start" if is_start else f"client {info.id}"] = params
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
