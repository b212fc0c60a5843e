"""Text as it becomes safe to show: whole characters only, and nothing of a stop text."""

from collections.abc import Sequence
from typing import Protocol


class TextStream(Protocol):
    """A tokenizer's streaming decoder."""

    def feed(self, token: int) -> str: ...

    def finish(self) -> str: ...


class StopText:
    """Decodes tokens as they come and ends at the earliest match of a stop text, also across tokens.

    Text that may yet turn out to begin a stop text is held back until it is known not to.
    """

    def __init__(self, stream: TextStream, stops: Sequence[str] = ()):
        if any(not stop for stop in stops):
            raise ValueError("a stop text must not be empty")
        self.stream, self.stops = stream, tuple(stops)
        self.held = ""
        self.matched = False

    def feed(self, token: int) -> str:
        """The text that is safe to show now that `token` has come."""
        return self._release(self.stream.feed(token))

    def finish(self) -> str:
        """What was still held back when no more tokens come."""
        if self.matched:
            return ""
        shown = self._release(self.stream.finish())
        shown, self.held = shown + self.held, ""
        return shown

    def _release(self, text: str) -> str:
        if self.matched:
            return ""
        self.held += text
        places = [at for at in (self.held.find(stop) for stop in self.stops) if at >= 0]
        if places:
            self.matched = True
            shown, self.held = self.held[: min(places)], ""
            return shown
        keep = max((_overlap(self.held, stop) for stop in self.stops), default=0)
        cut = len(self.held) - keep
        shown, self.held = self.held[:cut], self.held[cut:]
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
