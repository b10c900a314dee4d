"""An interactive chat: a question, the answer as it comes, and what it cost.

Owns the conversation and its display. Invariant: the messages sent are those shown; an answer that was broken off or failed is not among them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from rich.console import Console
from rich.text import Text

from actors.cli.api import Api
from cpd_ray.errors import CPDError
from cpd_ray.results import Chunk


class Conversation:
    """`system`: the system message, or empty. `fields`: of every request. `ask`: where questions come from; EOFError ends them."""

    def __init__(
        self,
        api: Api,
        system: str,
        fields: Mapping[str, Any],
        *,
        console: Console | None = None,
        ask: Callable[[], str] | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._opening = [{"role": "system", "content": system}] if system else []
        self._fields = fields
        self._console = console or Console(highlight=False)
        self._ask = ask or (lambda: self._console.input("[bold]> [/bold]"))
        self._now_s = now_s
        self.messages: list[dict[str, str]] = list(self._opening)

    def run(self) -> None:
        """Until `/exit`, the end of the input, or Ctrl-C at a question. Raises what speaks against the first request."""
        self._console.print("Ctrl-C ends an answer, /reset begins anew, /exit leaves.", style="dim")
        while True:
            try:
                question = self._ask().strip()
            except (EOFError, KeyboardInterrupt):
                return
            if question == "/exit":
                return
            if question == "/reset":
                self.messages = list(self._opening)
            elif question:
                self._turn(question)

    def _turn(self, question: str) -> None:
        asked = [*self.messages, {"role": "user", "content": question}]
        try:
            answer = self._answer(asked)
        except KeyboardInterrupt:
            self._console.print("\n(broken off)", style="dim")
        except CPDError as error:
            if not self.messages[len(self._opening) :]:
                raise
            self._console.print(f"error: {error.message}", style="red", markup=False)
        else:
            self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _answer(self, messages: list[dict[str, str]]) -> str:
        said, first_s, last, start_s = "", None, None, self._now_s()
        with closing(self._api.chat({**self._fields, "messages": messages})) as chunks:
            for last in chunks:
                if last.text and first_s is None:
                    first_s = self._now_s() - start_s
                said += last.text
                self._console.print(last.text, end="", markup=False, soft_wrap=True)
        self._console.print()
        if last is not None:
            self._console.print(Text(_cost(last, first_s, self._now_s() - start_s), style="dim"))
        return said


def _cost(last: Chunk, first_s: float | None, whole_s: float) -> str:
    """One line: time to first token, how much was cached and where, the way and why."""
    told = [f"first token after {whole_s if first_s is None else first_s:.2f} s"]
    if last.usage is not None:
        told.append(f"{last.usage.completion_tokens} tokens in {whole_s:.2f} s")
    if last.usage is not None and last.trace is not None:
        tiers = {"pool": last.trace.cached.pool, "node": last.trace.cached.node, "cluster": last.trace.cached.cluster}
        found = ", ".join(f"{name} {count}" for name, count in tiers.items() if count)
        told.append(
            f"{last.trace.cached.total} of {last.usage.prompt_tokens} prompt tokens cached" + (f" ({found})" if found else "")
        )
        told.append(f"{last.trace.route}: {last.trace.reason}")
    return " - ".join(told)
