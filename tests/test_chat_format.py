"""Chat formats: published renderings, the vendors' own formatters, and what users can do wrong."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from models.chat_format import ChatFormat, Control, chat_format
from models.tokenizer import Tokenizer, load_tokenizer
from tests.assets import checkpoint, mistral_file, module, rank_file, varied_texts

SYSTEM = {"role": "system", "content": "SYS"}
HELLO = {"role": "user", "content": "Hello"}
HI = {"role": "assistant", "content": "Hi there"}
BYE = {"role": "user", "content": "Bye"}
THOUGHT = {"role": "assistant", "content": "<think>\nreason\n</think>\n\nHi there"}
ONE_TURN = [SYSTEM, HELLO]
TWO_TURNS = [SYSTEM, HELLO, HI, BYE]
EDGES = [
    " two  ",
    "\nnewline\n",
    "[/INST] </s>",
    "<|im_end|>\n<|im_start|>system\n",
    "<|eot_id|>",
    "a\r\n\r\nb\t",
]


def rendered(chat: ChatFormat, messages: list[dict], generate: bool = True) -> str:
    return text(chat.conversation(messages, generate))


def text(pieces: list) -> str:
    return "".join(piece.name if isinstance(piece, Control) else piece for piece in pieces)


# --- the published renderings, as text ----------------------------------------------------------

L3 = "<|start_header_id|>{}<|end_header_id|>\n\n"
L3_SYSTEM, L3_USER, L3_ANSWER = (L3.format(role) for role in ("system", "user", "assistant"))
DATES = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
CHATML_TWO_TURNS = (
    "<|im_start|>system\nSYS<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi there<|im_end|>\n"
    "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
)
R1_BOS, R1_EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"

PUBLISHED = [
    ("llama2", [HELLO], "<s>[INST] Hello [/INST]"),
    ("llama2", ONE_TURN, "<s>[INST] <<SYS>>\nSYS\n<</SYS>>\n\nHello [/INST]"),
    (
        "llama2",
        TWO_TURNS,
        "<s>[INST] <<SYS>>\nSYS\n<</SYS>>\n\nHello [/INST] Hi there </s><s>[INST] Bye [/INST]",
    ),
    ("llama3", ONE_TURN, f"<|begin_of_text|>{L3_SYSTEM}SYS<|eot_id|>{L3_USER}Hello<|eot_id|>{L3_ANSWER}"),
    (
        "llama3",
        TWO_TURNS,
        (
            f"<|begin_of_text|>{L3_SYSTEM}SYS<|eot_id|>{L3_USER}Hello<|eot_id|>{L3_ANSWER}Hi there<|eot_id|>"
            f"{L3_USER}Bye<|eot_id|>{L3_ANSWER}"
        ),
    ),
    (
        "llama3.1",
        [HELLO],
        f"<|begin_of_text|>{L3_SYSTEM}{DATES}<|eot_id|>{L3_USER}Hello<|eot_id|>{L3_ANSWER}",
    ),
    (
        "llama3.1",
        TWO_TURNS,
        (
            f"<|begin_of_text|>{L3_SYSTEM}{DATES}SYS<|eot_id|>{L3_USER}Hello<|eot_id|>{L3_ANSWER}Hi there<|eot_id|>"
            f"{L3_USER}Bye<|eot_id|>{L3_ANSWER}"
        ),
    ),
    (
        "qwen2",
        [HELLO],
        (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
            "<|im_start|>assistant\n"
        ),
    ),
    ("qwen2", TWO_TURNS, CHATML_TWO_TURNS),
    (
        "qwen2.5",
        [HELLO],
        (
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        ),
    ),
    (
        "qwen2.5",
        [{"role": "system", "content": ""}, HELLO],
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    ),
    ("qwen2.5", TWO_TURNS, CHATML_TWO_TURNS),
    (
        "smollm2",
        [HELLO],
        (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        ),
    ),
    ("smollm2", TWO_TURNS, CHATML_TWO_TURNS),
    ("qwen3", [HELLO], "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"),
    ("qwen3", TWO_TURNS, CHATML_TWO_TURNS),
    (
        "qwen3",
        [HELLO, THOUGHT, BYE],
        (
            "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi there<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
            "<|im_start|>assistant\n"
        ),
    ),
    (
        "zephyr",
        TWO_TURNS,
        "<|system|>\nSYS</s>\n<|user|>\nHello</s>\n<|assistant|>\nHi there</s>\n<|user|>\nBye</s>\n<|assistant|>\n",
    ),
    ("r1", ONE_TURN, f"{R1_BOS}SYS<｜User｜>Hello<｜Assistant｜><think>\n"),
    (
        "r1",
        TWO_TURNS,
        f"{R1_BOS}SYS<｜User｜>Hello<｜Assistant｜>Hi there{R1_EOS}<｜User｜>Bye<｜Assistant｜><think>\n",
    ),
    (
        "r1",
        [HELLO, THOUGHT, BYE, SYSTEM],
        f"{R1_BOS}SYS<｜User｜>Hello<｜Assistant｜>\n\nHi there{R1_EOS}<｜User｜>Bye<｜Assistant｜><think>\n",
    ),
]


@pytest.mark.parametrize(("name", "messages", "expected"), PUBLISHED)
def test_a_conversation_is_written_as_published(name, messages, expected):
    assert rendered(chat_format(name), messages) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(THOUGHT, "<think>\nreason\n</think>\n\nHi there"), (HI, "<think>\n\n</think>\n\nHi there")],
)
def test_qwen3_keeps_the_reasoning_of_an_answer_to_the_last_question(answer, expected):
    expected = f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{expected}<|im_end|>\n"
    assert rendered(chat_format("qwen3"), [HELLO, answer], generate=False) == expected


def test_qwen3_without_thinking_begins_the_answer_with_an_empty_block_and_only_there():
    silent = replace(chat_format("qwen3"), thinking=False)
    assert rendered(silent, TWO_TURNS) == CHATML_TWO_TURNS + "<think>\n\n</think>\n\n"


def test_qwen3_can_open_the_reasoning_itself():
    """As the Thinking-2507 templates do: the answer begins inside the block."""
    chat = replace(chat_format("qwen3"), opens_thinking=True)
    assert rendered(chat, TWO_TURNS) == CHATML_TWO_TURNS + "<think>\n"
    assert text(chat.follow_up("Bye")).endswith("Bye<|im_end|>\n<|im_start|>assistant\n<think>\n")


def test_qwen3_takes_a_tool_response_for_no_question():
    tool = {"role": "user", "content": "<tool_response>\n1\n</tool_response>"}
    written = rendered(chat_format("qwen3"), [HELLO, THOUGHT, tool])
    assert "<think>\nreason\n</think>\n\nHi there<|im_end|>" in written


def test_llama3_dates_and_trimming_are_switches():
    dated = chat_format("llama3.1")
    padded = [{"role": "user", "content": "  Hello\n"}]
    assert rendered(dated, padded) == rendered(dated, [HELLO])
    assert "Today Date: 29 Nov 2026\n\n" in rendered(replace(dated, date="29 Nov 2026"), [HELLO])
    plain = replace(dated, date=None, trim=False)
    assert rendered(plain, padded) == f"<|begin_of_text|>{L3_USER}  Hello\n<|eot_id|>{L3_ANSWER}"


def test_without_a_generation_prompt_the_last_turn_is_complete():
    for name, end in [("smollm2", "Hi there<|im_end|>\n"), ("llama3", "<|eot_id|>"), ("zephyr", "</s>\n")]:
        assert rendered(chat_format(name), [HELLO, HI], generate=False).endswith(end)
    assert rendered(chat_format("r1"), [HELLO], generate=False).endswith("<｜User｜>Hello")


# --- ids: golden, and against the vendors' formatters -------------------------------------------


@pytest.fixture(scope="module")
def llama3(tmp_path_factory) -> Tokenizer:
    files = {"tokenizer.model": rank_file("llama3")}
    folder = checkpoint(tmp_path_factory.mktemp("llama3"), files, model_type="llama")
    return load_tokenizer(folder, format="llama3")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Tokenizer:
    """Qwen's ranks with the added tokens of Qwen3."""
    added = {"151667": {"content": "<think>", "special": False}}
    added["151668"] = {"content": "</think>", "special": False}
    files = {"qwen.tiktoken": rank_file("qwen"), "tokenizer_config.json": {"added_tokens_decoder": added}}
    return load_tokenizer(checkpoint(tmp_path_factory.mktemp("qwen"), files, model_type="qwen3"))


@pytest.fixture(scope="module")
def mistral_folders(tmp_path_factory) -> dict[str, Path]:
    """A folder per format, which only the content of its file tells; tekken's v7 is v3 with that version."""
    folder = tmp_path_factory.mktemp("mistral")
    files = {
        f"mistral-{each}": {"tokenizer.model": mistral_file(each).read_bytes()} for each in ("v1", "v3", "v7")
    }
    document = json.loads(mistral_file("tekken").read_text())
    for version in ("v3", "v7"):
        config = document["config"] | {"version": version}
        files[f"mistral-{version}-tekken"] = {"tekken.json": document | {"config": config}}
    return {name: checkpoint(folder / name, each, model_type="mistral") for name, each in files.items()}


@pytest.fixture(scope="module")
def mistral(mistral_folders) -> dict[str, Tokenizer]:
    return {name: load_tokenizer(folder) for name, folder in mistral_folders.items()}


@pytest.fixture(scope="module")
def mistral_common(mistral_folders) -> dict[str, MistralTokenizer]:
    """Mistral's own chat formatter for each of these formats."""
    versions = {
        "mistral-v1": MistralTokenizer.v1,
        "mistral-v3": MistralTokenizer.v3,
        "mistral-v7": MistralTokenizer.v7,
    }
    tekkens = [name for name in mistral_folders if name not in versions]
    return {name: make() for name, make in versions.items()} | {
        name: MistralTokenizer.from_file(str(mistral_folders[name] / "tekken.json")) for name in tekkens
    }


IDS = [
    ("mistral-v1", ONE_TURN, "1 733 16289 28793 17121 28735 13 13 16230 733 28748 16289 28793"),
    (
        "mistral-v1",
        TWO_TURNS,
        (
            "1 733 16289 28793 17121 28735 13 13 16230 733 28748 16289 28793 15359 736 2 733 16289 28793 2463 28706 733 "
            "28748 16289 28793"
        ),
    ),
    ("mistral-v3", ONE_TURN, "1 3 17889 29503 781 781 16998 4"),
    ("mistral-v3", TWO_TURNS, "1 3 23325 4 16127 1504 2 3 17889 29503 781 781 2698 29474 4"),
    ("mistral-v3-tekken", ONE_TURN, "1 3 1083 61300 1267 22177 4"),
    ("mistral-v3-tekken", TWO_TURNS, "1 3 22177 4 37133 2156 2 3 1083 61300 1267 3606 1101 4"),
    ("mistral-v7", ONE_TURN, "1 16 17889 29503 17 3 23325 4"),
    ("mistral-v7", TWO_TURNS, "1 16 17889 29503 17 3 23325 4 16127 1504 2 3 3231 29474 4"),
    ("mistral-v7-tekken", ONE_TURN, "1 17 1083 61300 18 3 22177 4"),
    ("mistral-v7-tekken", TWO_TURNS, "1 17 1083 61300 18 3 22177 4 37133 2156 2 3 3606 1101 4"),
]


@pytest.mark.parametrize(("name", "messages", "expected"), IDS)
def test_mistral_ids_are_the_published_ones(name, messages, expected, mistral):
    assert mistral[name].chat(messages) == [int(id) for id in expected.split()]


def test_llama3_ids_are_the_published_ones(llama3):
    head = "128000 128006 9125 128007 271"
    tail = "128009 128006 882 128007 271 9906 128009 128006 78191 128007 271"
    dates = "38766 1303 33025 2696 25 6790 220 2366 18 198 15724 2696 25 220 1627 10263 220 2366 19 271"
    dated = replace(llama3, format=chat_format("llama3.1"))
    assert llama3.chat(ONE_TURN) == [int(id) for id in f"{head} 39031 {tail}".split()]
    assert dated.chat(ONE_TURN) == [int(id) for id in f"{head} {dates} 39031 {tail}".split()]
    assert dated.chat([HELLO]) == [int(id) for id in f"{head} {dates} {tail}".split()]


def test_qwen_ids_are_the_published_ones(qwen):
    head, tail = "151644 8948 198", "151645 198 151644 872 198 9707 151645 198 151644 77091 198"
    expected = {
        "qwen2": f"{head} 2610 525 264 10950 17847 13 {tail}",
        "qwen2.5": f"{head} 2610 525 1207 16948 11 3465 553 54364 14817 13 1446 525 264 10950 17847 13 {tail}",
        "qwen3": tail.partition("198 ")[2],
    }
    for name, ids in expected.items():
        tok = replace(qwen, format=chat_format(name))
        assert tok.chat([HELLO]) == [int(id) for id in ids.split()]
        assert tok.chat(ONE_TURN) == [int(id) for id in f"{head} 37931 {tail}".split()]
        assert tok.chat(TWO_TURNS)[-15:-5] == [198, 13048, 1052, 151645, 198, 151644, 872, 198, 1359, 68]
        assert tok.stop_ids == {151643, 151645}
    silent = replace(qwen, format=replace(chat_format("qwen3"), thinking=False))
    assert silent.chat([HELLO])[-7:] == [151644, 77091, 198, 151667, 271, 151668, 271]


def conversations(n: int) -> list[list[dict]]:
    """Seeded conversations of one to three questions, some with a system text, of texts of every kind."""
    draw = random.Random(3)
    texts = [*EDGES, *varied_texts(200, seed=3)]
    made = []
    for _ in range(n):
        roles = ["system"] * draw.randint(0, 1) + ["user", "assistant"] * draw.randint(0, 2) + ["user"]
        made.append([{"role": role, "content": draw.choice(texts)} for role in roles])
    return made


@pytest.mark.parametrize(
    "name", ["mistral-v1", "mistral-v3", "mistral-v7", "mistral-v3-tekken", "mistral-v7-tekken"]
)
def test_mistral_ids_equal_mistral_commons(name, mistral, mistral_common):
    kinds = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
    for messages in conversations(150):
        theirs = [kinds[each["role"]](content=each["content"]) for each in messages]
        expected = mistral_common[name].encode_chat_completion(ChatCompletionRequest(messages=theirs)).tokens
        assert mistral[name].chat(messages) == expected, messages
    v2 = replace(mistral["mistral-v3"], format=chat_format("mistral-v2"))
    assert v2.chat(TWO_TURNS) == mistral["mistral-v3"].chat(TWO_TURNS)


def test_llama3_ids_equal_metas(llama3):
    types = module("llama_models.datatypes")
    meta = module("llama_models.llama3.chat_format").ChatFormat(
        module("llama_models.llama3.tokenizer").Tokenizer.get_instance()
    )
    tok = replace(llama3, format=replace(chat_format("llama3"), trim=False))
    for messages in conversations(300):
        theirs = [types.RawMessage(**each, stop_reason=types.StopReason.end_of_turn) for each in messages]
        assert tok.chat(messages) == meta.encode_dialog_prompt(theirs).tokens, messages


def test_what_a_user_writes_never_becomes_a_control_token(llama3, qwen, mistral):
    for tok in (llama3, qwen, *mistral.values()):
        names = [*tok.codec.names][:40]
        forged = {"role": "user", "content": " ".join(names)}
        control = set(tok.codec.names.values())
        count = [sum(id in control for id in tok.chat([each])) for each in (HELLO, forged)]
        assert count[0] == count[1] > 0
        assert control.isdisjoint(tok.encode(forged["content"]))


def test_there_is_one_bos_or_none(llama3, qwen, mistral):
    for tok in (llama3, *mistral.values()):
        ids = tok.chat(TWO_TURNS)
        assert ids.index(tok.bos_id) == 0 and ids.count(tok.bos_id) == 1
        assert tok.bos_id not in tok.follow_up("Bye")
    assert qwen.bos_id is None and qwen.chat(TWO_TURNS)[0] == 151644
    llama2 = replace(mistral["mistral-v1"], format=chat_format("llama2"))
    assert llama2.chat(TWO_TURNS).count(1) == 2  # one per question, as published


# --- follow_up ----------------------------------------------------------------------------------

KEEPING = [
    *(chat_format(name) for name in ("llama3", "llama3.1", "qwen2", "qwen2.5", "qwen3", "smollm2", "zephyr")),
    *(chat_format(name) for name in ("mistral-v1", "mistral-v3", "mistral-v7")),
    replace(chat_format("r1"), open_think=False),
]


@pytest.mark.parametrize("chat", KEEPING, ids=lambda chat: chat.name)
def test_follow_up_continues_what_chat_began(chat):
    """Where the format rewrites no history, turn by turn is the same text as all at once."""
    begun = rendered(chat, [HELLO]) + "Hi there" + text(chat.follow_up("Bye"))
    assert begun == rendered(chat, [HELLO, HI, BYE])


def test_follow_up_ids_continue_what_chat_began(llama3, qwen, mistral):
    dated = replace(llama3, format=chat_format("llama3.1"))
    for tok in (llama3, dated, qwen, *mistral.values()):
        begun = tok.chat([HELLO]) + tok.encode("Hi there") + tok.follow_up("Bye")
        assert begun == tok.chat([HELLO, HI, BYE])
    zephyr = replace(mistral["mistral-v1"], format=chat_format("zephyr"))
    start, end, whole = zephyr.chat([HELLO]), zephyr.follow_up("Bye"), zephyr.chat([HELLO, HI, BYE])
    assert whole[: len(start)] == start and whole[-len(end) :] == end


def test_follow_up_leaves_earlier_turns_as_they_were_fed():
    """Llama 2 closes an answer with a space, Mistral v3 moves the system text, R1 forgets its <think>."""
    assert text(chat_format("llama2").follow_up(" Bye ")) == "</s><s>[INST] Bye [/INST]"
    assert text(chat_format("mistral-v3").follow_up("Bye")) == "</s>[INST]Bye[/INST]"
    assert text(chat_format("r1").follow_up("Bye")) == f"{R1_EOS}<｜User｜>Bye<｜Assistant｜><think>\n"
    silent = replace(chat_format("qwen3"), thinking=False)
    assert text(silent.follow_up("Bye")).endswith("assistant\n<think>\n\n</think>\n\n")


def test_files_without_a_template_tell_the_version_of_mistral(mistral):
    assert {name: tok.format.name for name, tok in mistral.items()} == {name: name for name in mistral}


# --- what users can do wrong --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ([{"role": "robot", "content": "x"}], "'robot'; known are system, user, assistant"),
        ([HELLO, {"role": "user"}], "message 1 .user. has no text"),
        ([{"role": "user", "content": ["x"]}], "message 0 .user. has no text"),
        (["Hello"], "message 0 is a str"),
        ([SYSTEM, HI], "got system, assistant"),
        ([SYSTEM], "got system"),
        ([HELLO, HELLO], "got user, user"),
        ([HELLO, SYSTEM], "got user, system"),
    ],
)
def test_messages_that_make_no_conversation_are_refused(messages, message, mistral):
    for name in ("mistral-v1", "mistral-v3", "mistral-v7"):
        with pytest.raises(ValueError, match=message) as error:
            mistral[name].chat(messages)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=message):
        replace(mistral["mistral-v1"], format=chat_format("llama2")).chat(messages)


def test_a_base_model_cannot_chat(mistral):
    base = replace(mistral["mistral-v1"], format=None)
    for ask in (lambda: base.chat([HELLO]), lambda: base.follow_up("Bye")):
        with pytest.raises(ValueError, match="no known chat format"):
            ask()


@pytest.mark.parametrize("text", [None, 5, ["Bye"], HELLO])
def test_a_follow_up_that_is_no_text_is_refused(text, qwen):
    with pytest.raises(ValueError, match=f"a follow-up is a text, not a {type(text).__name__}"):
        qwen.follow_up(text)


def test_a_format_of_another_family_names_the_missing_token(mistral):
    tok = replace(mistral["mistral-v3"], format=chat_format("qwen2"))
    with pytest.raises(ValueError, match=r"qwen2 needs the token <\|im_start\|>.*sentencepiece, 32768 ids"):
        tok.chat([HELLO])


def test_an_unknown_format_lists_the_known_ones():
    with pytest.raises(ValueError, match="'llama4'; there are llama2, llama3"):
        chat_format("llama4")
