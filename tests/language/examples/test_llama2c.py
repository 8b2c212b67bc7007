"""Models of llama2.c: the converted folder computes and cuts up texts as the format says."""

import importlib.util
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedlowrank.core.errors import DataError

SCRIPT = Path(__file__).parents[3] / "examples" / "llama2c.py"
SPEC = importlib.util.spec_from_file_location("llama2c", SCRIPT)
llama2c = importlib.util.module_from_spec(SPEC)
sys.modules["llama2c"] = llama2c
SPEC.loader.exec_module(llama2c)
convert_llama2c = llama2c.convert_llama2c

DIM, HIDDEN, LAYERS, HEADS, KV, LENGTH = 24, 20, 2, 6, 3, 16
PIECES = ["he", " t", "th", "the", " the", "ll", "hell", "llo", "ab", "bc", "abc", " a", "!"]
LETTERS = " abcdefghlot"
SPECIAL = ("<unk>", "<s>", "</s>")
VOCABULARY = 259 + len(PIECES) + len(LETTERS)


def arrays(seed, tied):
    """The arrays of a random model in the order of the format, by the names that llama2.c gives them."""
    r = np.random.default_rng(seed)
    head, kv = DIM // HEADS, DIM // HEADS * KV
    angle = np.arange(LENGTH)[:, None] / 10000.0 ** (np.arange(0, head, 2) / head)
    w = {
        "emb": r.normal(size=(VOCABULARY, DIM)),
        "att": 1 + r.normal(size=(LAYERS, DIM)) / 5,
        "wq": r.normal(size=(LAYERS, DIM, DIM)) / 3,
        "wk": r.normal(size=(LAYERS, kv, DIM)) / 3,
        "wv": r.normal(size=(LAYERS, kv, DIM)) / 3,
        "wo": r.normal(size=(LAYERS, DIM, DIM)) / 3,
        "ffn": 1 + r.normal(size=(LAYERS, DIM)) / 5,
        "w1": r.normal(size=(LAYERS, HIDDEN, DIM)) / 3,
        "w2": r.normal(size=(LAYERS, DIM, HIDDEN)) / 3,
        "w3": r.normal(size=(LAYERS, HIDDEN, DIM)) / 3,
        "final": 1 + r.normal(size=DIM) / 5,
        "cos": np.cos(angle),
        "sin": np.sin(angle),
    }
    if not tied:
        w["out"] = r.normal(size=(VOCABULARY, DIM))
    return {n: v.astype(np.float32) for n, v in w.items()}


def forward(w, ids):
    """Scores of a sequence, in float64, with RoPE on adjacent pairs as run.c has it."""
    w = {n: v.astype(np.float64) for n, v in w.items()}
    n, head = len(ids), DIM // HEADS
    x = w["emb"][ids]

    def norm(x, gain):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gain

    def rotate(v, heads):
        v = v.reshape(n, heads, head).copy()
        even, odd = v[..., 0::2].copy(), v[..., 1::2].copy()
        cos, sin = w["cos"][:n, None], w["sin"][:n, None]
        v[..., 0::2], v[..., 1::2] = even * cos - odd * sin, even * sin + odd * cos
        return v

    for i in range(LAYERS):
        h = norm(x, w["att"][i])
        q, k = rotate(h @ w["wq"][i].T, HEADS), rotate(h @ w["wk"][i].T, KV)
        v = (h @ w["wv"][i].T).reshape(n, KV, head)
        out = np.zeros((n, HEADS, head))
        for j in range(HEADS):
            group = j // (HEADS // KV)
            for t in range(n):
                score = k[: t + 1, group] @ q[t, j] / np.sqrt(head)
                p = np.exp(score - score.max())
                out[t, j] = p / p.sum() @ v[: t + 1, group]
        x = x + out.reshape(n, DIM) @ w["wo"][i].T
        h = norm(x, w["ffn"][i])
        gate = h @ w["w1"][i].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["w3"][i].T)) @ w["w2"][i].T
    return norm(x, w["final"]) @ w.get("out", w["emb"]).T


def write(folder, w, tied=True):
    header = (DIM, HIDDEN, LAYERS, HEADS, KV, VOCABULARY if tied else -VOCABULARY, LENGTH)
    model, tokenizer = folder / "model.bin", folder / "tokens.bin"
    model.write_bytes(struct.pack("<7i", *header) + b"".join(v.tobytes() for v in w.values()))
    tokens = vocabulary()
    longest = max(len(p.encode()) for p, _ in tokens)
    tokenizer.write_bytes(
        struct.pack("<i", longest)
        + b"".join(struct.pack("<fi", s, len(p.encode())) + p.encode() for p, s in tokens)
    )  # fmt: skip
    return model, tokenizer


def vocabulary():
    rest = [*PIECES, *LETTERS]
    return [
        ("<unk>", 0.0), ("\n<s>\n", 0.0), ("\n</s>\n", 0.0), *((f"<0x{b:02X}>", 0.0) for b in range(256)),
        *((p, -float(i)) for i, p in enumerate(rest)),
    ]  # fmt: skip


def encode(tokens, text):
    """Greedy merging as run.c does it, on a list of (piece, score)."""
    known = {p: i for i, (p, _) in enumerate(tokens)}
    out = [1]
    for c in f" {text}" if text else "":
        out += [known[c]] if c in known else [b + 3 for b in c.encode()]
    while True:
        best = None
        for i in range(len(out) - 1):
            made = known.get(tokens[out[i]][0] + tokens[out[i + 1]][0])
            if made is not None and (best is None or tokens[made][1] > best[0]):
                best = tokens[made][1], i, made
        if best is None:
            return out
        out[best[1] : best[1] + 2] = [best[2]]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    return convert_llama2c(*write(folder, arrays(0, True)), folder / "made")


@pytest.fixture(scope="module")
def tokenizer(small):
    return AutoTokenizer.from_pretrained(small)


@pytest.mark.few(1)
@pytest.mark.parametrize("tied", [True, False])
def test_a_random_model_gives_the_scores_of_the_format(tmp_path, tied):
    w = arrays(3, tied)
    convert_llama2c(*write(tmp_path, w, tied), tmp_path / "made")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made").eval()
    assert model.config.tie_word_embeddings is tied
    ids = np.random.default_rng(1).integers(0, VOCABULARY, LENGTH)
    with torch.inference_mode():
        ours = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    assert np.allclose(ours, forward(w, ids), atol=2e-4)
    assert model.num_parameters() == sum(v.size for n, v in w.items() if n not in ("cos", "sin"))


@pytest.mark.full
def test_the_numbers_of_the_header_reach_the_config(small):
    config = AutoModelForCausalLM.from_pretrained(small).config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (DIM, HIDDEN, LAYERS)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (
        HEADS,
        KV,
        VOCABULARY,
    )
    assert (config.max_position_embeddings, config.bos_token_id, config.eos_token_id) == (LENGTH, 1, 2)


@pytest.mark.full
@given(
    st.one_of(
        st.text(max_size=12),
        st.text(LETTERS + "!é", max_size=20),
        st.lists(st.sampled_from(PIECES)).map("".join),
    )
)
def test_texts_are_cut_as_the_format_says(tokenizer, text):
    assume(not any(name in text for name in SPECIAL))
    ids = tokenizer(text).input_ids
    assert ids == encode(vocabulary(), text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_special_token_written_out_is_the_token(tokenizer):
    """Here alone the cut differs from that of llama2.c, and is that of every tokenizer of transformers."""
    for i, name in enumerate(SPECIAL):
        assert i in tokenizer(f"a{name}b").input_ids[1:]
        assert i not in encode(vocabulary(), f"a{name}b")[1:]


def test_pieces_merge_by_score_and_bytes_stand_for_the_rest(tokenizer):
    ids = {p: i for i, (p, _) in enumerate(vocabulary())}
    # "he" scores best, then " t", then the two together: the longer "hell" never comes about
    assert tokenizer("thell").input_ids == [1, ids[" the"], ids["ll"]]
    assert tokenizer("\n").input_ids == [1, ids[" "], 3 + 10]
    assert tokenizer("é").input_ids == [1, ids[" "], 3 + 0xC3, 3 + 0xA9]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda m, _: m.write_bytes(b"12"), "too few"),
        (lambda m, _: m.write_bytes(m.read_bytes()[:-4]), "by its header"),
        (lambda m, _: m.write_bytes(m.read_bytes() + b"0000"), "by its header"),
        (lambda m, _: m.write_bytes(struct.pack("<I", 0x616B3432) + m.read_bytes()), "later version"),
        (lambda m, _: m.write_bytes(struct.pack("<7i", 24, 20, 2, 5, 5, 300, 16)), "header reads"),
        (lambda m, _: m.write_bytes(struct.pack("<7i", 24, 20, -2, 6, 3, 300, 16)), "header reads"),
        (lambda m, _: m.unlink(), "cannot read"),
        (lambda _, t: t.write_bytes(t.read_bytes()[:-1]), "cut short"),
        (lambda _, t: t.write_bytes(t.read_bytes()[:-3]), "no llama2.c tokenizer"),
        (
            lambda _, t: t.write_bytes(t.read_bytes() + struct.pack("<fi", 0, 1) + b"z"),
            "285 tokens, but the model has",
        ),
        (lambda _, t: t.write_bytes(t.read_bytes().replace(b"<0x0A>", b"<0x0B>")), "256 byte tokens"),
        (lambda _, t: t.write_bytes(t.read_bytes().replace(b"abc", b"llo")), "a token twice"),
        (lambda _, t: t.write_bytes(t.read_bytes().replace(b"abc", b"ab\xff")), "token"),
    ],
)
def test_files_that_are_not_of_the_format(tmp_path, damage, words):
    model, tokenizer = write(tmp_path, arrays(0, True))
    damage(model, tokenizer)
    with pytest.raises(DataError, match=words):
        convert_llama2c(model, tokenizer, tmp_path / "made")


@pytest.mark.full
def test_the_script_converts_or_names_the_fault(tmp_path):
    def convert(*paths):
        return subprocess.run([sys.executable, SCRIPT, *paths], capture_output=True, text=True, check=False)

    model, tokenizer = write(tmp_path, arrays(0, True))
    assert convert(model, tokenizer, tmp_path / "made").stdout == f"{tmp_path / 'made'}\n"
    assert AutoTokenizer.from_pretrained(tmp_path / "made")("the").input_ids[0] == 1
    actual = convert(tmp_path / "none.bin", tokenizer, tmp_path / "made")
    assert actual.returncode == 2
    assert "cannot read" in actual.stderr


@pytest.fixture(scope="module")
def stories(real, tmp_path_factory):
    where = real / "stories260K"
    if not where.is_dir():
        pytest.skip("there is no folder stories260K among the real data")
    folder = tmp_path_factory.mktemp("stories")
    return where, convert_llama2c(where / "stories260K.bin", where / "tok512.bin", folder)


@pytest.mark.data
def test_the_real_model_tells_its_story(stories):
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(stories[1]).eval(),
        AutoTokenizer.from_pretrained(stories[1]),
    )
    out = model.generate(torch.tensor([[1]]), max_new_tokens=60, do_sample=False, pad_token_id=2)[0]
    assert out[:15].tolist() == [1, 403, 407, 261, 378, 432, 383, 286, 261, 376, 298, 315, 421, 395, 317]
    text = tokenizer.decode(out, skip_special_tokens=True)
    assert text.startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, "
    )


@pytest.mark.data
def test_the_real_tokenizer_cuts_as_the_format_says(stories):
    data, at, tokens = (stories[0] / "tok512.bin").read_bytes(), 4, []
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at)
        tokens.append((data[at + 8 : at + 8 + length].decode(), score))
        at += 8 + length
    pieces, tokenizer = [p for p, _ in tokens[259:]], AutoTokenizer.from_pretrained(stories[1])

    @given(st.one_of(st.text(max_size=20), st.lists(st.sampled_from(pieces), max_size=12).map("".join)))
    def check(text):
        assume(not any(name in text for name in SPECIAL))
        ids = tokenizer(text).input_ids
        assert ids == encode(tokens, text)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text

    check()
