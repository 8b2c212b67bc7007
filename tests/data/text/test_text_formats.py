"""Formats of instructions against templates written out by hand."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.core.errors import ConfigError
from fedlowrank.data.text.text_formats import Format, render_instruction
from fedlowrank.data.text.text_records import Instruction

CHATML = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


def test_alpaca_is_the_published_template() -> None:
    with_input = """Below is an instruction that describes a task, paired with an input that provides further context. Write a response that appropriately completes the request.

### Instruction:
Add {input} up.

### Input:
1, 2

### Response:"""  # noqa: E501
    without = """Below is an instruction that describes a task. Write a response that appropriately completes the request.

### Instruction:
Add {input} up.

### Response:"""
    assert render_instruction(Instruction("Add {input} up.", "3", "1, 2"), "alpaca") == (with_input, "3")
    assert render_instruction(Instruction("Add {input} up.", "3"), "alpaca") == (without, "3")


def test_plain_and_none() -> None:
    assert render_instruction(Instruction("p", "r", "i"), "plain") == ("p\ni\n", "r")
    assert render_instruction(Instruction("p", "r"), "plain") == ("p\n", "r")
    assert render_instruction(Instruction("", "r"), "plain") == ("", "r")
    assert render_instruction(Instruction("p", "r", "i"), "none") == ("", "r")


def test_chat_is_the_template_of_the_tokenizer(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    prompt = "<|start|>user\np\n\ni<|end|>\n<|start|>assistant\n"
    assert render_instruction(Instruction("p", "r", "i"), "chat", tokenizer) == (prompt, "r<|end|>\n")
    assert render_instruction(Instruction("", "r", "i"), "chat", tokenizer)[0] == prompt.replace("p\n\n", "")


text = st.text(alphabet="ab {}\n", max_size=6)


@given(
    prompt=text.filter(bool), input=text, response=text.filter(bool), format=st.sampled_from(get_args(Format))
)
def test_the_prompt_is_the_same_without_a_response(
    tokenizer: Any, prompt: str, input: str, response: str, format: Format
) -> None:
    tokenizer.chat_template = CHATML
    learnt, answer = render_instruction(Instruction(prompt, response, input), format, tokenizer)
    asked, nothing = render_instruction(Instruction(prompt, "", input), format, tokenizer)
    assert asked == learnt
    assert nothing == ""
    assert answer.startswith(response)
    if format != "none":
        assert prompt in asked
        assert input in asked


def test_formats_that_do_not_fit_are_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    for lacking in (None, tokenizer):
        with pytest.raises(ConfigError, match="needs a tokenizer with a chat template"):
            render_instruction(Instruction("p", "r"), "chat", lacking)
    for needy in ("alpaca", "chat"):
        with pytest.raises(ConfigError, match=r"plain text\. Use format 'none'"):
            render_instruction(Instruction("", "r"), needy, tokenizer)
    with pytest.raises(ConfigError, match=r"unknown format 'alpca'. Did you mean 'alpaca'\?"):
        render_instruction(Instruction("p", "r"), "alpca", tokenizer)  # type: ignore[arg-type]
    # a template that numbers the turns at the beginning: with a response, the prompt is another
    tokenizer.chat_template = "{{ messages | length }}" + CHATML
    with pytest.raises(ConfigError, match="writes another prompt when a response follows"):
        render_instruction(Instruction("p", "r"), "chat", tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(ConfigError, match="chat template fails: no such role"):
        render_instruction(Instruction("p", "r"), "chat", tokenizer)
