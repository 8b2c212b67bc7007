"""Lists and counts in sentences read as people write them."""

from fedlowrank.core.io.text import format_count, join_words, list_first


def test_words_are_joined_as_in_a_sentence() -> None:
    assert [join_words(words) for words in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "",
        "a",
        "a and b",
        "a, b and c",
    ]
    assert join_words(["a", "b", "c"], "or") == "a, b or c"


def test_a_long_list_shows_its_first_names_and_counts_the_others() -> None:
    assert list_first(["a", "b", "c"], 3) == "a, b, c"
    assert list_first(["a", "b", "c", "d"], 3) == "a, b, c and 1 more"
    assert list_first({7: "x", 9: "y"}, 1, "files") == "7 and 1 more files"
    assert list_first([], 3) == ""


def test_one_has_a_singular_noun() -> None:
    assert [format_count(n, "client") for n in (0, 1, 2)] == ["0 clients", "1 client", "2 clients"]
    assert format_count(3, "class", "classes") == "3 classes"
