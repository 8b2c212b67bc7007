"""Answers to a few fixed prompts before and after a run, so that people can read what changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .chat_session import ChatSession
from .export.server_model import find_server_model
from .scores.generate import Decoding

if TYPE_CHECKING:
    from ..rounds.run import Run
    from .text_federation import Language

MOST_CLIENTS = 4
"""Clients whose own models answer."""


def sample_answers(language: Language, run: Run) -> list[dict[str, Any]]:
    """The models' greedy answers to the prompts of the section ``[language]``.

    Before the first round it is one model; later the server's, if there is one, and those of the first clients.

    Returns:
        A row for each model and prompt: ``round``, ``model``, ``prompt`` and ``answer``; none without prompts.
    """
    prompts = language.settings.prompts
    if not prompts:
        return []
    infos = run.federation.infos
    models: dict[str, Any] = {} if (server := find_server_model(run)) is None else {"server": server}
    if run.round == 0:
        models = {"start": run.personal(infos[0]) if server is None else server}
    else:
        models |= {f"client {info.id}": run.personal(info) for info in infos[:MOST_CLIENTS]}
    decoding = Decoding(max_new_tokens=language.settings.answer_tokens)
    template = language.prompt_template or "{instruction}"
    found = []
    for name, params in models.items():
        with language.live(params) as module:
            for prompt in prompts:
                # a conversation of its own for each
                session = ChatSession(
                    module,
                    language.loaded.tokenizer,
                    lambda text: template.replace("{instruction}", text),
                    decoding,
                )
                answer = session.reply(prompt)
                found.append({"round": run.round, "model": name, "prompt": prompt, "answer": answer})
    return found
