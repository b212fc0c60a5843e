#!/usr/bin/env python3
"""Talk to a model whose KV cache keeps to a budget.

    python scripts/chat.py
    python scripts/chat.py --model llama3-8b --budget 512 --prompt-file report.txt

Without a prompt it is a conversation (type /help); with --prompt, --prompt-file or piped input it answers
once, the answer alone on standard output and everything else on standard error.
"""

import argparse
import io
import json
import signal
import sys
from pathlib import Path
from statistics import median
from types import FrameType

try:
    import readline
except ImportError:
    readline = None

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataclasses import replace

from minikv import Chat, CompressedKVCache, Policy
from minikv.cache import DEFAULT_CONTEXT
from minikv.sizing import fit_policy, parse_bytes
from minikv.step import CompiledStep, step
from models import load_model, load_tokenizer
from scripts.command_line import Parser, with_token_kinds

DEFAULT_MODEL = "smollm2-135m"

HELP = """\
/reset         forget the conversation
/system TEXT   set the system prompt and start anew
/stats         speed and memory of the last answer
/file FILE ... send a file's text, followed by the rest of the line
/save FILE     write the conversation as JSON
/save-cache FILE  write the cache and the conversation, for --load-cache
/help          this list
/quit          leave (so does Ctrl-D); Ctrl-C stops an answer"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="Talk to a model whose KV cache keeps to a budget.")
    add = parser.add_argument
    add(
        "--model",
        default=DEFAULT_MODEL,
        help=f"preset, folder, .gguf file or downloaded hub id ({DEFAULT_MODEL})",
    )
    add(
        "--budget",
        default="full",
        help="tokens kept per KV head per layer, on average; 0 or full (default): all",
    )
    add("--kv-bytes", help="instead of a budget: bytes of the whole cache, such as 64MiB or 1.5GB")
    add(
        "--policy",
        help="what stays, e.g. streaming or snapkv(window=16) (default: snapkv if there is a budget)",
    )
    add(
        "--every", type=int, help="compress every N generated tokens; 0: only after prompts (default: --room)"
    )
    add("--room", type=int, default=256, help="fresh tokens between two compressions (256)")
    add("--context", type=int, help="most tokens a full cache can hold (default: the model's limit or 8192)")
    add("--sinks", type=int, help="first tokens never dropped (default: the policy's)")
    add("--recent", type=int, help="last tokens never dropped (default: the policy's)")
    add("--chunk", type=int, help="feed long prompts in pieces of N tokens: less memory, but approximate")
    add("--compile", action=argparse.BooleanOptionalAction, default=False, help="compile the decode step")
    add("--dtype", help="float32, bfloat16 or float16 (default: bfloat16 on a GPU, else float32)")
    add("--quantize", help="int8 or int4 weights: less memory, and faster answers with --compile")
    add("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    add("--prompt", help="answer this and leave")
    add("--prompt-file", type=Path, help="answer what is in this file, followed by --prompt")
    add("--system", help="system prompt (default: the model's own)")
    add("--max-new-tokens", type=int, default=512, help="longest answer (512)")
    add("--temperature", type=float, default=0.7, help="0 always takes the likeliest token (0.7)")
    add("--top-p", type=float, default=0.95, help="sample from the likeliest tokens with this mass (0.95)")
    add("--top-k", type=int, default=0, help="sample from this many likeliest tokens; 0: all (0)")
    add("--seed", type=int, help="makes sampling repeatable")
    add("--save-cache", type=Path, help="write cache and conversation here at the end of a one-shot answer")
    add("--load-cache", type=Path, help="go on with a conversation saved so or by /save-cache")
    add("--stats", action="store_true", help="speed and memory after each answer")
    return parser.parse_args(argv)


def choose_policy(args: argparse.Namespace) -> tuple[Policy, int]:
    """The policy and the budget that the flags ask for; the context stands in for a budget where nothing is dropped."""
    whole = args.budget in ("0", "full")
    if not whole and not args.budget.isdecimal():
        raise ValueError(f"--budget takes a number of tokens or 'full', not {args.budget!r}")
    if args.kv_bytes is not None and not whole:
        raise ValueError(f"--kv-bytes {args.kv_bytes} and --budget {args.budget} both say how much; give one")
    policy = Policy.parse(args.policy or ("full" if whole and args.kv_bytes is None else "snapkv"))
    if whole and args.kv_bytes is None and policy.drops:
        raise ValueError(f"--policy {args.policy} needs a --budget, for instance --budget 512")
    budget = (args.context or DEFAULT_CONTEXT) if whole else int(args.budget)
    if policy.drops or policy.every == 1:
        # Per-step or once, a method's own habit is for papers; here memory stays bounded by default.
        policy = replace(policy, every=None)
    changes = {name: getattr(args, name) for name in ("every", "sinks", "recent")}
    return replace(policy, **{k: v for k, v in changes.items() if v is not None}), budget


def stats(chat: Chat) -> str:
    """Speed and memory of the last answer, one line each."""
    cache, timing = chat.cache, chat.timing
    config = chat.model.config
    kept = [len(head) for layer in range(config.n_layers) for head in cache.kept(layer)[0]]
    element = chat.model.norm.weight.element_size()
    seen = int(cache.seen[0])
    full = 2 * config.n_layers * config.n_kv_heads * config.head_dim * element * seen
    lines = [
        f"prompt {chat.prompt_tokens} tokens, generated {chat.new_tokens}, ended by {chat.reason}",
        f"prefill {timing.prefill:.2f} s, first token after {timing.first_token:.2f} s",
        f"cache {cache.nbytes / 2**20:.1f} MiB; a full cache's keys and values for {seen} tokens: {full / 2**20:.1f} MiB",
        f"kept {sum(kept) / len(kept):.1f} tokens per KV head per layer of {seen} seen",
    ]
    if timing.steps:
        lines.insert(
            2, f"decode {1 / median(timing.steps):.1f} tokens/s (median of {len(timing.steps)} steps)"
        )
    if cache.policy.every == 0:
        lines.append("every=0: generated tokens are not compressed, the cache grows with the answer")
    return "\n".join(lines)


class Interrupt:
    """Ctrl-C asks the running answer to stop; a second one before it has leaves the program."""

    def __init__(self):
        self.asked = False

    def __enter__(self) -> "Interrupt":
        self.asked = False
        self.before = signal.signal(signal.SIGINT, self.handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def answer(chat: Chat, text: str, options: dict, show_stats: bool) -> bool:
    """Stream one answer to standard output, all else to standard error; whether it came to its end."""
    with Interrupt() as interrupt:
        pieces = chat.send(text, **options)
        for piece in pieces:
            print(piece, end="", flush=True)
            if interrupt.asked:
                pieces.close()
                break
    print()
    if show_stats:
        note(stats(chat))
    if chat.full:
        note(f"the context of {chat.cache.limit} tokens is full; nothing was dropped, /reset starts anew")
    return not interrupt.asked


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def converse(chat: Chat, options: dict, show_stats: bool) -> None:
    """The interactive loop."""
    note("type a message, or /help")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            note("\n(/quit or Ctrl-D to leave)")
            continue
        if not line:
            continue
        try:
            if line.split()[0] == "/file":
                answer(chat, file_text(line), options, show_stats)
            elif not line.startswith("/"):
                answer(chat, line, options, show_stats)
            elif command(chat, line):
                return
        except (ValueError, OSError) as error:
            note(f"error: {error}")


def file_text(line: str) -> str:
    """`/file report.txt What is new?` -> the file's text and the question."""
    words = line.split(maxsplit=2)
    if len(words) < 2:
        raise ValueError("/file needs a file name, for instance /file report.txt What is new?")
    return "\n\n".join([read_text(Path(words[1])), *words[2:]])


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text (byte {error.start})") from error


def command(chat: Chat, line: str) -> bool:
    """Run a /command; true means leave."""
    word, _, rest = line.partition(" ")
    rest = rest.strip()
    if word in ("/quit", "/exit"):
        return True
    if word == "/help":
        note(HELP)
    elif word == "/reset":
        chat.reset()
        note("conversation forgotten")
    elif word == "/system":
        if not rest:
            raise ValueError("/system needs a text, for instance /system Answer in one sentence.")
        chat.start(rest)
        note("system prompt set, conversation begun anew")
    elif word == "/stats":
        note(stats(chat) if chat.timing.prefill else "nothing has been answered yet")
    elif word == "/save":
        if not rest:
            raise ValueError("/save needs a file name, for instance /save talk.json")
        text = json.dumps(chat.messages, ensure_ascii=False, indent=2) + "\n"
        Path(rest).write_bytes(text.encode("utf-8", "replace"))
        note(f"{len(chat.messages)} messages written to {rest}")
    elif word == "/save-cache":
        if not rest:
            raise ValueError("/save-cache needs a file name, for instance /save-cache report.safetensors")
        chat.save_cache(rest)
        note(f"{chat.cache.nbytes / 2**20:.1f} MiB of cache written to {rest}")
    else:
        raise ValueError(f"unknown command {word}; /help lists them")
    return False


def prompt_text(args: argparse.Namespace) -> str | None:
    """The one-shot prompt from flags or piped input; None means a conversation."""
    parts = [] if args.prompt_file is None else [read_text(args.prompt_file)]
    if args.prompt is not None:
        parts.append(args.prompt)
    if not parts:
        if sys.stdin is None:
            raise ValueError("there is no standard input; give a --prompt or a --prompt-file")
        if sys.stdin.isatty():
            return None
        parts.append(sys.stdin.read())
    text = "\n\n".join(parts)
    if not text.strip():
        raise ValueError("the prompt is empty")
    return text


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a stray byte must not end a conversation
    try:
        policy, budget = choose_policy(args)
        text = prompt_text(args)
        tok = load_tokenizer(args.model)
        policy = with_token_kinds(policy, tok)
        model = load_model(args.model, args.device, args.dtype, quantize=args.quantize)
        context = args.context
        if args.kv_bytes is not None:
            policy, budget, context = fit_policy(
                model, policy, parse_bytes(args.kv_bytes), args.room, context
            )
        cache = CompressedKVCache.for_model(model, policy, budget=budget, room=args.room, context=context)
        chat = Chat(model, tok, cache, system=args.system, max_new_tokens=args.max_new_tokens)
        if args.load_cache is not None:
            chat.load_cache(args.load_cache)
        options = dict(
            temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed, chunk=args.chunk,
            step=CompiledStep(chat.cache) if args.compile else step,
        )  # fmt: skip
        if text is None:
            converse(chat, options, args.stats)
        else:
            whole = answer(chat, text, options, args.stats)
            if args.save_cache is not None:
                chat.save_cache(args.save_cache)
            return 0 if whole else 130
    except (ValueError, OSError) as error:
        note(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
