"""A conversation that keeps its cache: each turn feeds only what is new."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

from torch import nn

from minikv.cache import CompressedKVCache
from minikv.generate import Options, Timing, decode, end_ids
from minikv.stop import StopText


class Chat:
    """Turns with one cache (batch 1). `messages` is the conversation so far, as role and content.

    The tokens that went through the model stay as they were sampled: earlier answers are never encoded
    again, and nothing of an earlier turn is rewritten (some published templates would).
    """

    def __init__(
        self,
        model: nn.Module,
        tok: Any,
        cache: CompressedKVCache,
        system: str | None = None,
        max_new_tokens: int = 512,
    ):
        if len(cache.seen) != 1:
            raise ValueError(f"a chat is one conversation, the cache holds {len(cache.seen)} rows")
        self.model, self.tok, self.cache = model, tok, cache
        self.max_new_tokens = max_new_tokens
        self.answering: Generator[str, None, None] = (piece for piece in ())  # the answer at hand
        self.start(system)

    def start(self, system: str | None) -> None:
        """Forget the conversation and begin anew under `system` (None: the model's default)."""
        self.answering.close()
        self.cache.reset()
        self.system = system
        self.messages: list[dict[str, str]] = (
            [] if system is None else [{"role": "system", "content": system}]
        )
        self.unfed: list[int] = []  # the last sampled token, which no step has fed yet
        self.reason: str | None = None
        self.timing, self.prompt_tokens, self.new_tokens = Timing(), 0, 0

    def reset(self) -> None:
        self.start(self.system)

    def save_cache(self, path: str | Path) -> None:
        """Write the cache and the conversation to one file, from which `load_cache` goes on."""
        self.cache.save(path, note={name: getattr(self, name) for name in ("system", "messages", "unfed")})

    def load_cache(self, path: str | Path) -> None:
        """Go on where a saved conversation ended; nothing of it is encoded again. The file's policy rules."""
        cache = CompressedKVCache.load(path, self.model)
        if cache.note is None:
            raise ValueError(f"{path} holds a cache without a conversation; use CompressedKVCache.load")
        self.answering.close()
        self.cache, self.reason = cache, None
        for name, value in cache.note.items():
            setattr(self, name, value)

    @property
    def full(self) -> bool:
        """Whether the context is used up: the next turn would be refused."""
        return int(self.cache.seen[0]) + 1 >= self.cache.limit

    def turn(self, text: str) -> list[int]:
        """The ids the next user message adds to what the cache has seen."""
        if int(self.cache.seen[0]) == 0:
            return self.tok.chat([*self.messages, {"role": "user", "content": text}])
        return self.unfed + self.tok.follow_up(text)

    def send(self, text: str, **options: Any) -> Generator[str, None, None]:
        """Stream the answer to a user message as pieces of text; options as in `generate`.

        Stopping early (closing the iterator, or sending the next message) keeps what was said so far.
        Raises ValueError, with nothing changed, if the turn does not fit into the context.
        """
        self.answering.close()
        how = Options(**{"max_new_tokens": self.max_new_tokens, **options})
        ids = self.turn(text)
        seen = int(self.cache.seen[0])
        if seen + len(ids) >= self.cache.limit:
            raise ValueError(
                f"the conversation has {seen} tokens and this turn {len(ids)}, which leaves no room for an "
                f"answer in a context of {self.cache.limit}; start anew (/reset), or shorten the text"
            )
        self.answering = self._answer(text, ids, how)
        return self.answering

    def _answer(self, text: str, ids: list[int], how: Options) -> Generator[str, None, None]:
        ends = frozenset() if how.ignore_eos else end_ids(self.model, self.tok)
        shown = StopText(self.tok.stream(), how.stop)
        running, said = [True], []
        self.timing, self.prompt_tokens, self.new_tokens = Timing(), len(ids), 0
        self.reason = "length"
        seen = int(self.cache.seen[0])
        try:
            for (token,) in decode(
                self.model, [ids], self.cache, how, running, n_ids=self.tok.vocab_size, timing=self.timing
            ):
                self.unfed = [] if token in ends else [token]
                if token in ends:
                    self.reason, running[0] = "eos", False
                    continue
                self.new_tokens += 1
                piece = shown.feed(token)
                if shown.matched:
                    self.reason, running[0] = "stop", False
                said.append(piece)
                yield piece
            said.append(shown.finish())
            yield said[-1]
        except GeneratorExit:
            self.reason = "interrupted"
            raise
        finally:
            if int(self.cache.seen[0]) > seen:  # the turn has been read
                self.unfed = self.unfed if self.new_tokens else []
                self.messages.append({"role": "user", "content": text})
                self.messages.append({"role": "assistant", "content": "".join(said)})
