"""Tokenizer: text to ids and back, streaming, and conversations, for every kind of tokenizer file."""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from models.chat_choice import format_of_files, format_of_template
from models.chat_format import ChatFormat, Control, Message, Piece, chat_format
from models.codec import Codec
from models.fields import Fields, read_fields
from models.tokenizer_files import read_codec

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a checkpoint and the chat format it was trained with (None: no chat model).

    `dataclasses.replace(tok, format=...)` gives one that talks another format, for instance
    `replace(tok.format, thinking=False)`.
    """

    codec: Codec
    format: ChatFormat | None
    eos_ids: frozenset[int]

    @property
    def stop_ids(self) -> set[int]:
        """Every id that ends an answer, by generation_config.json, config.json or the chat format."""
        stops = self.format.stops if self.format else ()
        names = self.codec.names
        return {*self.eos_ids, *(names[name] for name in stops if name in names)}

    @property
    def bos_id(self) -> int | None:
        """The id that opens a text; None for families that have none (Qwen, SmolLM2)."""
        return self.codec.bos_id

    @property
    def vocab_size(self) -> int:
        """Highest id with a token, plus one; the model may have more rows, as padding."""
        return self.codec.n_ids

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """The ids of plain text: spellings of control tokens in it are ordinary characters.

        With `bos`, the id that opens a text comes first, in families that have one.
        """
        # Half of a surrogate pair is no character; str allows it, UTF-8 does not.
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = self.codec.encode(whole)
        return [self.bos_id, *ids] if bos and self.bos_id is not None else ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Control tokens and ids without a token add nothing to it.

        Bytes that are not UTF-8 become U+FFFD. A vocabulary that puts a space before every text
        (sentencepiece) takes it away here, so the text of an answer begins with its first letter.
        """
        stream = self.stream()
        return "".join([*map(stream.feed, ids), stream.finish()])

    def stream(self) -> "Stream":
        return Stream(self.codec)

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """The ids of a conversation, a list of {"role": ..., "content": ...}, ready for the next answer."""
        pieces = self._format().conversation(checked(messages), add_generation_prompt)
        return self._ids(pieces)

    def follow_up(self, text: str) -> list[int]:
        """The ids that continue a chat whose last answer is in the cache, without its end token.

        Ends the answer's turn, asks `text` and prepares the next answer. Earlier turns stay as they
        were fed, also where `chat` would rewrite them; see `ChatFormat.follow_up`.
        """
        if not isinstance(text, str):
            raise ValueError(f"a follow-up is a text, not a {type(text).__name__}")
        return self._ids(self._format().follow_up(text))

    def _format(self) -> ChatFormat:
        if self.format is None:
            raise ValueError(
                "this checkpoint has no known chat format (a base model?); use encode, or name a "
                "format: load_tokenizer(folder, format=...)"
            )
        return self.format

    def _ids(self, pieces: Iterable[Piece]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            ids += [self._control(piece)] if isinstance(piece, Control) else self.encode(piece)
        return ids

    def _control(self, control: Control) -> int:
        if control.name not in self.codec.names:
            raise ValueError(
                f"the chat format {self._format().name} needs the token {control.name}, which this "
                f"tokenizer ({self.codec.kind}, {self.vocab_size} ids) does not have"
            )
        return self.codec.names[control.name]


class Stream:
    """Ids in, text out as it becomes certain: only whole characters leave before `finish`."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True

    def feed(self, id: int) -> str:
        id = int(id)
        data = self._codec.pieces.get(id, b"")
        if self._at_start and data:
            self._at_start = False
            data = data[id in self._codec.dummy_prefix :]
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left of a character that was cut off, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


def load_tokenizer(directory: Path, format: str | None = None) -> Tokenizer:
    """The tokenizer of a Hugging Face style folder; `format` names a chat format instead of finding it.

    Family and format come from config.json, the chat template and the content of the tokenizer file.
    Raises FileNotFoundError or ValueError in one line where the folder has no usable tokenizer.
    """
    directory = Path(directory)
    config = read_fields(directory / "config.json")
    settings = read_fields(directory / "tokenizer_config.json")
    generation = read_fields(directory / "generation_config.json")
    added = added_tokens(settings)
    special = {token.text("content") for token in added.values() if token.flag("special", False)}
    codec = with_added_tokens(read_codec(directory, config.text("model_type", ""), special), added)
    eos = frozenset(config.ids("eos_token_id") + generation.ids("eos_token_id"))
    template = chat_template(directory, settings)
    if format is not None:
        chosen = chat_format(format)
    elif template:
        chosen = format_of_template(template, config, codec)
    else:
        chosen = format_of_files(config, codec, eos)
    return Tokenizer(codec, chosen, eos)


def added_tokens(settings: Fields) -> dict[int, Fields]:
    """The `added_tokens_decoder` of tokenizer_config.json: what it says of each token, by id."""
    table = settings.table("added_tokens_decoder")
    for id in table.raw:
        if not id.isdecimal():
            raise ValueError(f"{table.where}{id}: the name of each entry must be a token id")
    return {int(id): table.table(id) for id in table.raw}


def with_added_tokens(codec: Codec, added: dict[int, Fields]) -> Codec:
    """Also the tokens that tokenizer_config.json adds to the file, or names in it.

    It may add ids at the end, and rename control tokens; ids that carry text stay as they are.
    """
    new = {id: token for id, token in added.items() if not codec.pieces.get(id)}
    pieces = {
        id: b"" if token.flag("special", False) else token.text("content").encode()
        for id, token in new.items()
    }
    kept = {name: id for name, id in codec.names.items() if id not in new}
    names = kept | {token.text("content"): id for id, token in new.items()}
    return replace(codec, pieces=codec.pieces | pieces, names=names)


def chat_template(directory: Path, settings: Fields) -> str:
    """The text of the folder's Jinja template, "" without one.

    It stands in a file of its own, else in tokenizer_config.json, else (an older way) in chat_template.json.
    """
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no text in UTF-8; fetch it again") from error
    if not settings.has("chat_template"):
        settings = read_fields(directory / "chat_template.json")
    if not isinstance(settings.raw.get("chat_template"), list):
        return settings.text("chat_template", "")
    named = {each.text("name"): each.text("template") for each in settings.tables("chat_template")}
    return named.get("default", "")


def checked(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages. Raises ValueError unless each has a known role and text as its content."""
    if not messages:
        raise ValueError("there are no messages; a chat needs at least one")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(
                f"message {index} is a {type(message).__name__}; needed is a dict of role and content"
            )
        if message.get("role") not in ROLES:
            raise ValueError(
                f"message {index} has the role {message.get('role')!r}; known are {', '.join(ROLES)}"
            )
        if not isinstance(message.get("content"), str):
            raise ValueError(f"message {index} ({message['role']}) has no text as its content")
    return messages
