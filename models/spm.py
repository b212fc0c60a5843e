"""A sentencepiece model (Llama 2, TinyLlama, Mistral up to v7) -> Codec."""

import sentencepiece

from models.codec import Codec

SPACE = "▁"


def read_sentencepiece(data: bytes, path: str) -> Codec:
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=data)
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


def piece_bytes(model: sentencepiece.SentencePieceProcessor, id: int, spelling: str) -> bytes:
    if model.is_control(id):
        return b""
    if model.is_byte(id):
        return bytes([int(spelling[1:-1], 16)])  # "<0x0A>"
    if model.is_unknown(id):
        return model.decode([id]).encode()
    return spelling.replace(SPACE, " ").encode()
