"""A sentencepiece model (Llama 2, TinyLlama, Mistral up to v7) -> Codec."""

from collections.abc import Set

from models.codec import Codec
from models.protobuf import field, messages

try:
    import sentencepiece
except ImportError:  # other kinds of tokenizer do without
    sentencepiece = None

SPACE = "▁"
# Token types and field numbers: google/sentencepiece, src/sentencepiece_model.proto.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
PIECE, PIECE_TYPE = 1, 3


def read_sentencepiece(data: bytes, path: str, special: Set[str] = frozenset()) -> Codec:
    """A model as a Codec. `special`: spellings of control tokens that the model may hold as text.

    Some vocabularies have their control tokens as user-defined pieces, which the library finds in any
    text. Here such a piece becomes a control piece, so its spelling is encoded as ordinary characters.
    """
    try:
        model = processor(data)
        if ids := text_pieces(model, special):
            model = processor(as_control(data, ids))
    except RuntimeError as error:
        raise ValueError(f"{path} is a damaged sentencepiece model; fetch it again") from error
    ids = range(model.get_piece_size())
    spellings = {id: model.id_to_piece(id) for id in ids}
    opening = [id for id in ids if spellings[id].startswith(SPACE)]
    # The library removes the space it put before a text: from any opening piece, or from none.
    dummy = any(len(model.decode([id])) < len(spellings[id]) for id in opening[:1])
    return Codec(
        "sentencepiece",
        model.encode,
        {id: piece_bytes(model, id, spelling) for id, spelling in spellings.items()},
        {spelling: id for id, spelling in spellings.items() if model.is_control(id)},
        frozenset(opening if dummy else ()),
    )


def processor(data: bytes) -> "sentencepiece.SentencePieceProcessor":
    """The library's view of a model. Raises RuntimeError, as the library does, for damaged data."""
    if sentencepiece is None:
        raise ValueError("a sentencepiece model needs the package sentencepiece: pip install sentencepiece")
    return sentencepiece.SentencePieceProcessor(model_proto=data)


def text_pieces(model: "sentencepiece.SentencePieceProcessor", spellings: Set[str]) -> set[int]:
    """The ids of those spellings that are pieces to which text may be encoded."""
    ids = {model.piece_to_id(spelling) for spelling in spellings}
    return {id for id in ids if not (model.is_control(id) or model.is_unknown(id))}


def as_control(data: bytes, ids: Set[int]) -> bytes:
    """The model with these pieces made control pieces."""
    parts, id = [], 0
    for number, content in messages(data):
        if number == PIECE:
            # Of a field that is there twice the last one counts.
            content += field(PIECE_TYPE, CONTROL) if id in ids else b""
            id += 1
        parts.append(field(number, content))
    return b"".join(parts)


def piece_bytes(model: "sentencepiece.SentencePieceProcessor", id: int, spelling: str) -> bytes:
    if model.is_control(id):
        return b""
    if model.is_byte(id):
        return bytes([int(spelling[1:-1], 16)])  # "<0x0A>"
    if model.is_unknown(id):
        return model.decode([id]).encode()
    return spelling.replace(SPACE, " ").encode()
