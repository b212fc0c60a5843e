"""Chat formats: how a conversation is written, as Python instead of a Jinja template.

A format gives *pieces*: plain text, and `Control` for a control token. The tokenizer encodes each
text on its own and looks each control token up by name, so what a user writes can never become a
control token, and no second BOS can slip in.

Where the published template and the vendor's own library differ, the template is followed and the
difference is noted.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Message = Mapping[str, str]


@dataclass(frozen=True)
class Control:
    name: str


Piece = str | Control

EOS = Control("</s>")
BOS = Control("<s>")
THINK, END_THINK = Control("<think>"), Control("</think>")


@dataclass(frozen=True)
class ChatFormat(ABC):
    """`stops` are the names of the tokens that end an answer."""

    name: str
    stops: tuple[str, ...] = ("</s>",)

    @abstractmethod
    def conversation(self, messages: Sequence[Message], generate: bool) -> list[Piece]:
        """All messages; with `generate`, also what comes before the next answer."""

    @abstractmethod
    def follow_up(self, text: str) -> list[Piece]:
        """What continues a conversation after an answer that is already in the cache.

        That is the end of the answer's turn, a user turn and what comes before the next answer. The
        cache holds the conversation as it was fed, so this cannot do what some templates do to
        earlier turns: strip their reasoning (Qwen3, R1), move the system text to the last user turn
        (Mistral v2, v3), strip spaces at the end of an answer (Mistral) or add one (Llama 2).
        """


@dataclass(frozen=True)
class ChatML(ChatFormat):
    """Qwen2, Qwen2.5, SmolLM2: <|im_start|>role, text, <|im_end|>, with a system turn of their own."""

    stops: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")
    default_system: str | None = None

    def conversation(self, messages: Sequence[Message], generate: bool) -> list[Piece]:
        if messages[0]["role"] != "system" and self.default_system is not None:
            messages = [{"role": "system", "content": self.default_system}, *messages]
        pieces = [piece for i in range(len(messages)) for piece in self.turn(self.content(messages, i))]
        return pieces + self.opening() if generate else pieces

    def follow_up(self, text: str) -> list[Piece]:
        return [Control("<|im_end|>"), "\n", *self.turn([f"user\n{text}"]), *self.opening()]

    def turn(self, content: list[Piece]) -> list[Piece]:
        return [Control("<|im_start|>"), *content, Control("<|im_end|>"), "\n"]

    def content(self, messages: Sequence[Message], index: int) -> list[Piece]:
        return [f"{messages[index]['role']}\n{messages[index]['content']}"]

    def opening(self) -> list[Piece]:
        return [Control("<|im_start|>"), "assistant\n"]


@dataclass(frozen=True)
class Qwen3(ChatML):
    """ChatML whose answers may begin with reasoning, which is kept after the last question only.

    Without `thinking`, an answer is made to begin with an empty think block. `opens_thinking`: answers
    begin inside one, as for QwQ and the Thinking-2507 models, which cannot do without.
    """

    thinking: bool = True
    opens_thinking: bool = False

    def content(self, messages: Sequence[Message], index: int) -> list[Piece]:
        message = messages[index]
        if message["role"] != "assistant":
            return super().content(messages, index)
        reasoning, text = split_reasoning(message["content"])
        is_last = index == len(messages) - 1
        if index > last_question(messages) and (is_last or reasoning):
            visible = text.lstrip("\n")
            return ["assistant\n", THINK, f"\n{reasoning}\n", END_THINK, f"\n\n{visible}"]
        return [f"assistant\n{text}"]

    def opening(self) -> list[Piece]:
        if self.opens_thinking:
            return [*super().opening(), THINK, "\n"]
        if self.thinking:
            return super().opening()
        return [*super().opening(), THINK, "\n\n", END_THINK, "\n\n"]


def split_reasoning(answer: str) -> tuple[str, str]:
    """(what stands in the first think block, what follows the last one), as Qwen3's template reads them."""
    if "</think>" not in answer:
        return "", answer
    first, after = answer.partition("</think>")[0], answer.rpartition("</think>")[2]
    return first.rpartition("<think>")[2].strip("\n"), after.lstrip("\n")


def last_question(messages: Sequence[Message]) -> int:
    """Index of the last user turn that is not just a tool's response; the last turn if there is none."""
    for index in reversed(range(len(messages))):
        text = messages[index]["content"]
        is_tool = text.startswith("<tool_response>") and text.endswith("</tool_response>")
        if messages[index]["role"] == "user" and not is_tool:
            return index
    return len(messages) - 1


@dataclass(frozen=True)
class Llama3(ChatFormat):
    """Llama 3 and later: a header with the role before each text, <|eot_id|> after it.

    The template of 3.1 and later opens with a system turn that tells the knowledge cutoff and `date`;
    Meta's own library writes neither, which is `date=None`, and does not `trim` texts.
    """

    stops: tuple[str, ...] = ("<|eot_id|>", "<|end_of_text|>")
    date: str | None = None
    trim: bool = True

    def conversation(self, messages: Sequence[Message], generate: bool) -> list[Piece]:
        pieces: list[Piece] = [Control("<|begin_of_text|>")]
        if self.date is not None:
            system, messages = split_system(messages)
            dates = f"Cutting Knowledge Date: December 2023\nToday Date: {self.date}\n\n"
            pieces += self.turn("system", dates + self.trimmed(system or ""))
        for message in messages:
            pieces += self.turn(message["role"], self.trimmed(message["content"]))
        return pieces + self.header("assistant") if generate else pieces

    def follow_up(self, text: str) -> list[Piece]:
        turn = self.turn("user", self.trimmed(text))
        return [Control("<|eot_id|>"), *turn, *self.header("assistant")]

    def trimmed(self, text: str) -> str:
        return text.strip() if self.trim else text

    def turn(self, role: str, text: str) -> list[Piece]:
        return [*self.header(role), text, Control("<|eot_id|>")]

    def header(self, role: str) -> list[Piece]:
        return [Control("<|start_header_id|>"), role, Control("<|end_header_id|>"), "\n\n"]


@dataclass(frozen=True)
class Llama2(ChatFormat):
    """Llama 2: [INST] and <<SYS>> are ordinary text, and every question-answer pair opens with BOS.

    A user who writes these marks forges a turn; Meta's library refuses such text, the template does not.
    """

    def conversation(self, messages: Sequence[Message], generate: bool) -> list[Piece]:
        system, pairs = question_answer_pairs(self.name, messages)
        pieces: list[Piece] = []
        for question, answer in pairs:
            if system is not None:
                question, system = f"<<SYS>>\n{system}\n<</SYS>>\n\n{question}", None
            if answer is None:
                pieces += self.question(question)
            else:
                pieces += [BOS, f"[INST] {question.strip()} [/INST] {answer.strip()} ", EOS]
        return pieces

    def follow_up(self, text: str) -> list[Piece]:
        return [EOS, *self.question(text)]

    def question(self, text: str) -> list[Piece]:
        return [BOS, f"[INST] {text.strip()} [/INST]"]


@dataclass(frozen=True)
class MistralV1(ChatFormat):
    """Mistral 7B v0.1 and v0.2: [INST] is ordinary text, the system text joins the first question."""

    def conversation(self, messages: Sequence[Message], generate: bool) -> list[Piece]:
        system, pairs = question_answer_pairs(self.name, messages)
        pieces: list[Piece] = [BOS]
        for index, (question, answer) in enumerate(pairs):
            pieces += self.question(question, system if index == 0 else None)
            if answer is not None:
                pieces += self.answer(answer)
        return pieces

    def follow_up(self, text: str) -> list[Piece]:
        return [EOS, *self.question(text)]

    def question(self, text: str, system: str | None = None) -> list[Piece]:
        return [f"[INST] {with_system(system, text)} [/INST]"]

    def answer(self, text: str) -> list[Piece]:
        return [text, EOS]


@dataclass(frozen=True)
class Mistral(ChatFormat):
    """Mistral v2 and later: [INST] is a control token.

    `system_block`: the system text is a block of its own (v7), not part of the last question (v2, v3).
    """

    system_block: bool = False

    def conversation(self, messages: Sequence[Message], generate: bool) -> list[Piece]:
        system, pairs = question_answer_pairs(self.name, messages)
        pieces: list[Piece] = [BOS]
        if self.system_block and system is not None:
            pieces += [Control("[SYSTEM_PROMPT]"), system, Control("[/SYSTEM_PROMPT]")]
            system = None
        for index, (question, answer) in enumerate(pairs):
            is_last = index == len(pairs) - 1
            pieces += self.question(with_system(system if is_last else None, question))
            if answer is not None:
                pieces += [answer.rstrip(" "), EOS]
        return pieces

    def follow_up(self, text: str) -> list[Piece]:
        return [EOS, *self.question(text)]

    def question(self, text: str) -> list[Piece]:
        return [Control("[INST]"), text, Control("[/INST]")]


@dataclass(frozen=True)
class Zephyr(ChatFormat):
    """TinyLlama chat: <|role|> lines are ordinary text, </s> ends a turn, no BOS (as in the template).

    What stands between two </s> is one text, with sentencepiece's space before it, as `tokenizers` has it.
    """

    def conversation(self, messages: Sequence[Message], generate: bool) -> list[Piece]:
        pieces: list[Piece] = []
        between = ""
        for message in messages:
            pieces += [f"{between}<|{message['role']}|>\n{message['content']}", EOS]
            between = "\n"
        return [*pieces, "\n<|assistant|>\n" if generate else "\n"]

    def follow_up(self, text: str) -> list[Piece]:
        return [EOS, f"\n<|user|>\n{text}", EOS, "\n<|assistant|>\n"]


@dataclass(frozen=True)
class R1(ChatFormat):
    """DeepSeek-R1 distilled models: the last system text first, bare; answers begin inside <think>.

    `open_think` is False for the first release of the template, which left <think> to the model.
    """

    stops: tuple[str, ...] = ("<｜end▁of▁sentence｜>",)
    open_think: bool = True

    def conversation(self, messages: Sequence[Message], generate: bool) -> list[Piece]:
        systems = [message["content"] for message in messages if message["role"] == "system"]
        pieces: list[Piece] = [Control("<｜begin▁of▁sentence｜>"), *systems[-1:]]
        for message in messages:
            if message["role"] == "user":
                pieces += self.question(message["content"])
            elif message["role"] == "assistant":
                answer = message["content"].rpartition("</think>")[2]
                pieces += [Control("<｜Assistant｜>"), answer, Control("<｜end▁of▁sentence｜>")]
        return pieces + self.opening() if generate else pieces

    def follow_up(self, text: str) -> list[Piece]:
        return [Control("<｜end▁of▁sentence｜>"), *self.question(text), *self.opening()]

    def question(self, text: str) -> list[Piece]:
        return [Control("<｜User｜>"), text]

    def opening(self) -> list[Piece]:
        return [Control("<｜Assistant｜>"), *([THINK, "\n"] if self.open_think else [])]


def split_system(messages: Sequence[Message]) -> tuple[str | None, Sequence[Message]]:
    """The text of a system message at the start, and the other messages."""
    if messages[0]["role"] == "system":
        return messages[0]["content"], messages[1:]
    return None, messages


def with_system(system: str | None, question: str) -> str:
    return f"{system}\n\n{question}" if system else question


def question_answer_pairs(
    name: str, messages: Sequence[Message]
) -> tuple[str | None, list[tuple[str, str | None]]]:
    """The system text, and (question, answer) pairs of which the last may lack the answer.

    Raises ValueError unless user and assistant alternate after an optional system message.
    """
    system, turns = split_system(messages)
    roles = [message["role"] for message in turns]
    if not roles or any(role != ("user", "assistant")[i % 2] for i, role in enumerate(roles)):
        given = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"the chat format {name} takes an optional system message, then user and assistant in "
            f"turns, beginning with user; got {given}"
        )
    texts = [message["content"] for message in turns]
    answers = [*texts[1::2], None] if len(texts) % 2 else texts[1::2]
    return system, list(zip(texts[::2], answers, strict=True))


QWEN2_SYSTEM = "You are a helpful assistant."
QWEN25_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

FORMATS: dict[str, ChatFormat] = {
    each.name: each
    for each in (
        Llama2("llama2"),
        Llama3("llama3"),
        # The template's own date where the caller gives none; <|eom_id|> ends a call of a tool.
        Llama3("llama3.1", (*Llama3.stops, "<|eom_id|>"), date="26 Jul 2024"),
        MistralV1("mistral-v1"),
        Mistral("mistral-v2"),
        Mistral("mistral-v3"),
        Mistral("mistral-v3-tekken"),
        Mistral("mistral-v7", system_block=True),
        Mistral("mistral-v7-tekken", system_block=True),
        ChatML("chatml"),
        ChatML("qwen2", default_system=QWEN2_SYSTEM),
        ChatML("qwen2.5", default_system=QWEN25_SYSTEM),
        Qwen3("qwen3"),
        ChatML("smollm2", default_system=SMOLLM2_SYSTEM),
        Zephyr("zephyr"),
        R1("r1"),
    )
}


def chat_format(name: str) -> ChatFormat:
    """A format by its short name; `dataclasses.replace` changes its switches (date, thinking, ...)."""
    if name not in FORMATS:
        raise ValueError(f"no chat format is called {name!r}; there are {', '.join(FORMATS)}")
    return FORMATS[name]
