"""The effect, on your own machine: one long document asked about cold, then warm from each tier, then a follow-up turn.

Owns the story and its table; what answers is a `Stage`. Ends with one JSON line. Invariant: each row's tier is what the workers counted,
never what the story expected; a row that did not come from the tier it is named after fails the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich import box
from rich.console import Console
from rich.table import Table

from actors.text.codec import TextCodec
from actors.text.template import Chat
from cpd_ray import tokens as token_buffers
from cpd_ray.types import CachedTokens

DOCUMENT = Path(__file__).resolve().parents[1] / "LICENSE"
QUESTION = "In one sentence: what does this document allow me to do?"
FOLLOW_UP = "And what must I not do with the name of the licensor?"
FILLER = "Read the document below and answer questions about it.\n\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request came to; `workers` in the order that they took it."""

    text: str
    route: str
    workers: tuple[str, ...]
    ttft_s: float
    cached: CachedTokens


class Stage(Protocol):
    """A running cluster, as the story needs it."""

    async def ask(self, tokens: bytes, max_tokens: int) -> Answer: ...

    async def forget_pools(self) -> None:
        """Drop what workers' own pools hold."""
        ...

    async def settle(self) -> None:
        """Return when what was computed is written down and known, copies between nodes included."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    prompt_tokens: int
    answer: Answer

    @property
    def text(self) -> str:
        return self.answer.text.strip()

    def to_json(self) -> dict[str, object]:
        cached = self.answer.cached
        return {
            "name": self.name,
            "route": self.answer.route,
            "ttft_s": round(self.answer.ttft_s, 4),
            "cached_tokens": {"pool": cached.pool, "node": cached.node, "cluster": cached.cluster},
            "text": self.text,
        }


async def prompt_of(codec: TextCodec, turns: Sequence[tuple[str, str]], prompt_tokens: int) -> bytes:
    """The chat about the document, the document cut so that the first turn has about `prompt_tokens` tokens."""
    document = DOCUMENT.read_text()
    while token_buffers.count(await codec.encode(document)) < prompt_tokens:
        document += "\n" + DOCUMENT.read_text()
    cut = await codec.encode(document, add_special_tokens=False)
    document = await codec.decode(cut[: token_buffers.TOKEN_BYTES * prompt_tokens], skip_special_tokens=True)
    messages = [{"role": role, "content": content} for role, content in turns]
    messages[0]["content"] = FILLER + document + "\n\n" + messages[0]["content"]
    return await codec.encode_chat(Chat(tuple(messages)))


async def story(stage: Stage, codec: TextCodec, prompt_tokens: int, max_tokens: int, console: Console) -> list[Row]:
    """Five requests; what is forgotten between them decides which tier the next one is answered from."""
    turns = [("user", QUESTION)]
    prompt = await prompt_of(codec, turns, prompt_tokens)
    rows: list[Row] = []

    async def ask(name: str, tokens: bytes) -> Row:
        console.print(f"[dim]{name} ...[/dim]")
        answer = await stage.ask(tokens, max_tokens)
        rows.append(Row(name, token_buffers.count(tokens), answer))
        await stage.settle()
        return rows[-1]

    await ask("cold", prompt)
    await ask("warm, other node", prompt)
    await stage.forget_pools()
    await ask("warm, own node", prompt)
    first = await ask("warm, own pool", prompt)
    turns += [("assistant", first.text), ("user", FOLLOW_UP)]
    await ask("follow-up turn", await prompt_of(codec, turns, prompt_tokens))
    return rows


def check_tiers(rows: Sequence[Row]) -> list[str]:
    """What the counts contradict."""
    wanted = {"warm, other node": "cluster", "warm, own node": "node", "warm, own pool": "pool"}
    wrong = []
    for row in rows:
        cached = row.answer.cached
        if row.name == "cold" and cached.total:
            wrong.append(f"cold: {cached.total} tokens were cached")
        tier = wanted.get(row.name)
        if (tier and getattr(cached, tier) < cached.total) or (row.name != "cold" and not cached.total):
            wrong.append(f"{row.name}: cached {cached}")
    return wrong


def table(rows: Sequence[Row]) -> Table:
    """The rows as a person reads them, 80 columns wide."""
    out = Table(
        title=f"One document of {rows[0].prompt_tokens} tokens, asked about five times", title_justify="left", box=box.SIMPLE
    )
    for column in ("request", "route"):
        out.add_column(column, no_wrap=True)
    for column in ("prompt", "pool", "node", "cluster", "TTFT", "speed-up"):
        out.add_column(column, justify="right", no_wrap=True)
    cold_s = rows[0].answer.ttft_s
    for row in rows:
        cached, ttft_s = row.answer.cached, row.answer.ttft_s
        tiers = (str(cached.pool), str(cached.node), str(cached.cluster))
        out.add_row(row.name, row.answer.route, str(row.prompt_tokens), *tiers, f"{ttft_s:.3f} s", f"{cold_s / ttft_s:.1f}x")
    return out


def report(rows: Sequence[Row], console: Console) -> int:
    """Print table and JSON line; the exit status is 1 when a row was answered from another tier than its name says."""
    console.print(table(rows))
    for row in rows:
        console.print(f"  {row.name} ({' > '.join(row.answer.workers)}): {row.text}", highlight=False)
    base = rows[0].answer.text
    for row in rows[1:-1]:
        if (text := row.answer.text) != base:
            at = next((i for i, (a, b) in enumerate(zip(text, base, strict=False)) if a != b), min(len(text), len(base)))
            console.print(
                f"{row.name}: the text differs from the cold answer's from character {at} on (other step shapes round differently)"
            )
    wrong = check_tiers(rows)
    for line in wrong:
        console.print(f"[red]not from the tier that it should be from: {line}[/red]")
    print(json.dumps({"prompt_tokens": rows[0].prompt_tokens, "requests": [row.to_json() for row in rows]}), flush=True)
    return 1 if wrong else 0


def main() -> int:
    """Returns the exit status: 0 when each row was answered from the tier that it is named after."""
    parser = argparse.ArgumentParser(
        description="One long document, asked about cold and then warm from each tier of the KV cache."
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny[:sizes], a local folder or a hub id (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="%(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="%(default)s")
    parser.add_argument("--max-tokens", type=int, default=24, help="%(default)s")
    parser.add_argument("--without-ray", action="store_true", help="plain processes joined by gRPC instead of Ray and Serve")
    given = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when gRPC is imported, below
    from bench.demo_local import run_local
    from bench.demo_ray import run_ray

    run = run_local if given.without_ray else run_ray
    return asyncio.run(run(given.model, given.dtype, given.prompt_tokens, given.max_tokens, Console(file=sys.stderr)))


if __name__ == "__main__":
    raise SystemExit(main())
