"""Documents made warm before users come: each is computed once, by the pool that is not busy answering, and pinned for a while.

In one terminal:    make serve
In another:         .venv/bin/python examples/warm_documents.py LICENSE docs/ARCHITECTURE.md

`POST /v1/cpd/warm` takes the body of a request to come: here a chat whose system message is the document. Then a first user asks about each.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import httpx

QUESTION = "In one sentence: what is this document about?"


def warm(http: httpx.Client, document: str, ttl_s: float) -> dict[str, object]:
    """Compute, commit and pin the document's KV."""
    response = http.post("/v1/cpd/warm", json={"messages": [{"role": "system", "content": document}], "ttl_s": ttl_s})
    response.raise_for_status()
    warmed: dict[str, object] = response.json()
    return warmed


def ask(http: httpx.Client, document: str) -> dict[str, object]:
    """What a first user would do; the answer's `cpd` tells what was cached and how long the first token took."""
    messages = [{"role": "system", "content": document}, {"role": "user", "content": QUESTION}]
    body = {"messages": messages, "max_tokens": 32, "temperature": 0}
    response = http.post("/v1/chat/completions", json=body, headers={"X-CPD-Trace": "1"})
    response.raise_for_status()
    answer: dict[str, object] = response.json()
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=[Path("LICENSE")])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="", help="an API key, where the system asks for one")
    parser.add_argument("--ttl-s", type=float, default=600.0, help="for how long they stay cached, within the pin budget")
    parser.add_argument("--chars", type=int, default=8000, help="how much of each file is taken")
    given = parser.parse_args()
    headers = {"Authorization": f"Bearer {given.key}"} if given.key else {}
    with httpx.Client(base_url=given.url, headers=headers, timeout=300) as http:
        documents = {file: file.read_text()[: given.chars] for file in given.files}
        for file, document in documents.items():
            start_s = time.monotonic()
            warmed = warm(http, document, given.ttl_s)
            told = f"{warmed['prompt_tokens']} tokens, {warmed['pinned_blocks']} of {warmed['blocks']} blocks pinned"
            print(f"{file}: warm after {time.monotonic() - start_s:.2f} s ({told})")
        for file, document in documents.items():
            answer = ask(http, document)
            usage, trace = answer["usage"], answer["cpd"]
            assert isinstance(usage, dict) and isinstance(trace, dict)
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            print(f"{file}: first token after {trace['actual_ttft_s']:.2f} s, {cached} of {usage['prompt_tokens']} tokens cached")


if __name__ == "__main__":
    main()
