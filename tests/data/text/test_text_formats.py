"""Formats of instructions against templates written out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.data.text.chat.chat_template import ChatTemplate
from fedlowrank.data.text.text_formats import TEXT_FORMATS, Format, make_conversation, render_instruction
from fedlowrank.data.text.text_records import Instruction, Texts
from fedlowrank.data.text.tokens import TextSettings, tokenize
from tests.support.byte_tokenizers import byte_tokenizer

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


def test_chat_makes_a_question_of_instruction_and_input(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    chat = ChatTemplate(tokenizer, "response", "template")
    prompt = "<|start|>user\np\n\ni<|end|>\n<|start|>assistant\n"
    assert chat.write_prompt(make_conversation(Instruction("p", "r", "i"))) == prompt
    assert chat.write_prompt(make_conversation(Instruction("", "", "i"))) == prompt.replace("p\n\n", "")
    # a template that knows no such role
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(DataError, match=r"row 7: the chat template of .* fails: no such role"):
        chat.write_prompt(make_conversation(Instruction("p", "r"), "row 7"))


text = st.text(alphabet="ab {}\n", max_size=6)


@given(prompt=text.filter(bool), input=text, response=text.filter(bool), format=st.sampled_from(TEXT_FORMATS))
def test_the_prompt_is_the_same_without_a_response(
    prompt: str, input: str, response: str, format: Format
) -> None:
    learnt, answer = render_instruction(Instruction(prompt, response, input), format)
    asked, nothing = render_instruction(Instruction(prompt, "", input), format)
    assert asked == learnt
    assert nothing == ""
    assert answer == response
    if format != "none":
        assert prompt in asked
        assert input in asked


def test_formats_that_do_not_fit_are_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(
        ConfigError, match=r"format 'chat' need a tokenizer with a chat template.* format 'alpaca'"
    ):
        ChatTemplate(tokenizer, "response", "template")
    with pytest.raises(
        ConfigError, match=r"row 7 is plain text, .*'chat' needs instructions.*'auto' or 'plain'"
    ):
        make_conversation(Instruction("", "r"), "row 7")
    with pytest.raises(ConfigError, match=r"in the format 'alpca'\. Did you mean 'alpaca'\?"):
        render_instruction(Instruction("p", "r"), "alpca")  # type: ignore[arg-type]
    # rows decide what auto is
    with pytest.raises(ConfigError, match=r"in the format 'auto'\. Known: 'alpaca'"):
        render_instruction(Instruction("p", "r"), "auto")
    tokenizer.eos_token = tokenizer.pad_token = "[UNK]"
    with pytest.raises(ConfigError, match=r"records of 't' are plain text, and format 'alpaca' .*'none'"):
        tokenize(Texts("t", [Instruction("", "r")]), tokenizer, TextSettings("alpaca"))


@pytest.mark.parametrize("kind", ["auto", "alpaca"])
def test_plain_text_among_instructions_has_no_prompt(kind: Format) -> None:
    tokenizer = byte_tokenizer("chatml")
    end = str(tokenizer.eos_token)
    records = [Instruction("p", "one"), Instruction("", "two"), Instruction("q", "three")]
    data = tokenize(Texts("t", records, records[1:2]), tokenizer, TextSettings(kind))
    assert data.test is not None
    prompt = render_instruction(records[0], "alpaca")[0]
    expected = [f"{prompt}one{end}", f"two{end}", prompt.replace("\np\n", "\nq\n") + f"three{end}"]
    for examples, texts in ((data.train, expected), (data.test, expected[1:2])):
        x: Any = examples.x
        rows = zip(x["input_ids"], x["attention_mask"], strict=True)
        assert [tokenizer.decode(ids[mask == 1]) for ids, mask in rows] == texts
    notes = "\n".join(data.notes)
    assert "training part of 't': records without an instruction, written without a prompt: 1 of 3" in notes
    assert "test part of 't': records without an instruction, written without a prompt: 1 of 1" in notes
