"""Talk with a chat model, as the published ones are. The answer appears as it is made, on standard output; what the
model thinks before, and a line of statistics, on standard error. With a question it answers once; without one it asks
in the terminal until Ctrl-D, and remembers what was said. Ctrl-C breaks off an answer."""

import argparse
import json
import sys
from contextlib import suppress
from typing import Any

from inkling_jax.chat import ChatFormat, Reply
from inkling_jax.model import CHAT_TOKENS, Inkling, load

from .arguments import add_decoding, add_loading, decoding, effort, loading, some_text
from .generate import figures, given_text, summary

HELP = "talk with a chat model"
EXAMPLES = """\
examples:
  inkling-jax chat --model ./Inkling-Small
  inkling-jax chat --model ./Inkling-Small --prompt "Who wrote Faust?" --effort low
  inkling-jax chat --model ./Inkling-Small --system "Answer in French." --file question.txt --temperature 0.7
  inkling-jax chat --model ./Inkling-Small --prompt "Who wrote Faust?" --json | jq -r .text

The bundled nano is no chat model: use generate.
"""

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a directory or a hub id")
    add_loading(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", type=some_text, help="the question (default: ask in the terminal)")
    prompt.add_argument("--file", metavar="PATH", help="read the question from a file; - is standard input")
    parser.add_argument("--system", metavar="TEXT", type=some_text, help="instructions ahead of the conversation")
    parser.add_argument(
        "--effort",
        metavar="LEVEL",
        type=effort,
        default="high",
        help="how hard to think: none, minimal, low, medium, high (default), xhigh, max, or a number from 0 to 0.99",
    )
    add_decoding(parser, max_new_tokens=CHAT_TOKENS)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of streaming")


def run(arguments: argparse.Namespace) -> int:
    asking = arguments.prompt is None and arguments.file is None and sys.stdin is not None and sys.stdin.isatty()
    if asking and arguments.json:
        raise ValueError("--json prints one reply: give --prompt or --file, or text on standard input")
    question = None if asking else given_text(arguments).rstrip("\r\n")
    if question is not None and not question:
        raise ValueError("the question is empty: give at least one character")
    model = load(arguments.model, **loading(arguments))
    ChatFormat(model.tokenizer)  # no question before it is known that there will be an answer
    settings = decoding(arguments) | {"effort": arguments.effort}
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    if question is None:
        _converse(model, messages, settings)
        return 0
    messages.append({"role": "user", "content": question})
    if arguments.json:
        _print_json(model.chat(messages, **settings))
    else:
        _answer(model, messages, settings)
    return 0


def _converse(model: Inkling, messages: list[dict[str, str]], settings: dict[str, Any]) -> None:
    """Asks for questions and answers them. A turn that fails or is broken off is forgotten."""
    with suppress(ImportError):
        import readline  # noqa: F401  (arrow keys, and the questions asked before)
    while True:
        try:
            question = input("> ")
        except EOFError:
            print()
            return
        if not question.strip():
            continue
        asked = [*messages, {"role": "user", "content": question}]
        try:
            reply = _answer(model, asked, settings)
        except KeyboardInterrupt:
            print(f"{_style(PLAIN)}\nbroken off", file=sys.stderr)
        except (ValueError, MemoryError) as error:
            print(f"error: {error}", file=sys.stderr)
        else:
            if reply.text or reply.thinking:
                messages = [*asked, reply.message]


def _answer(model: Inkling, messages: list[dict[str, str]], settings: dict[str, Any]) -> Reply:
    stream = model.chat_stream(messages, **settings)
    thinking = False
    for kind, text in stream:
        if thinking != (kind == "thinking"):
            thinking = not thinking
            print(_style(DIM) if thinking else f"{_style(PLAIN)}\n", end="", file=sys.stderr, flush=True)
        print(text, end="", file=sys.stderr if thinking else sys.stdout, flush=True)
    if thinking:
        print(_style(PLAIN), file=sys.stderr, flush=True)
    print()
    reply = stream.reply
    if reply.finish_reason == "length":
        print("cut off at --max-new-tokens", file=sys.stderr)
    print(summary(reply.stats), file=sys.stderr)
    return reply


def _style(code: str) -> str:
    """A code for the terminal, where there is one."""
    return code if sys.stderr.isatty() else ""


def _print_json(reply: Reply) -> None:
    result = {
        "text": reply.text,
        "thinking": reply.thinking,
        "tokens": [int(token) for token in reply.completion.tokens],
        "finish_reason": reply.finish_reason,
        "statistics": figures(reply.stats),
    }
    print(json.dumps(result, allow_nan=False))
