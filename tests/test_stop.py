import pytest

from minikv.stop import StopText


class Pieces:
    """A stream whose tokens are pieces of text; the tail is what finish gives."""

    def __init__(self, tail: str = ""):
        self.tail = tail

    def feed(self, token: str) -> str:
        return token

    def finish(self) -> str:
        return self.tail


def run(pieces, stops, tail=""):
    text = StopText(Pieces(tail), stops)
    shown = []
    for piece in pieces:
        shown.append(text.feed(piece))
        if text.matched:
            break
    shown.append(text.finish())
    return "".join(shown), text.matched


def test_without_stops_everything_is_shown_at_once():
    text = StopText(Pieces())
    assert [text.feed(p) for p in ("a", "bc", "")] == ["a", "bc", ""]


def test_a_stop_text_across_tokens_is_never_shown():
    assert run(["Hello ", "EN", "D", " more"], ["END"]) == ("Hello ", True)
    assert run(["HelloE", "ND"], ["END"]) == ("Hello", True)


def test_a_beginning_that_leads_nowhere_is_shown_later():
    assert run(["aEN", "Eb"], ["END"]) == ("aENEb", False)
    assert run(["aEN"], ["END"]) == ("aEN", False)
    assert run(["aE"], ["END"], tail="\ufffd") == ("aE\ufffd", False)


def test_the_earliest_match_wins_whatever_the_order_of_the_stops():
    assert run(["one two three"], ["three", "two"]) == ("one ", True)
    assert run(["aab"], ["ab", "aab"]) == ("", True)


def test_overlapping_repeats_are_found():
    assert run(["a", "a", "a", "b"], ["aab"]) == ("a", True)


def test_a_stop_in_the_tail_counts():
    assert run(["x"], ["\ufffd"], tail="\ufffd") == ("x", True)


def test_an_empty_stop_text_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopText(Pieces(), ["ok", ""])
