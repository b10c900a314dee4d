"""A streamed chat with the `openai` client: change one base URL, nothing else.

In one terminal:    make serve
In another:         .venv/bin/python examples/openai_client.py "Why is the sky blue?"

Asked twice, the second answer begins sooner: its prompt's KV is cached. The header `X-CPD-Trace: 1` makes the last chunk tell how.
"""

from __future__ import annotations

import argparse
import time

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="none", help="an API key, where the system asks for one")
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args()

    client = OpenAI(base_url=given.url, api_key=given.key, default_headers={"X-CPD-Trace": "1"})
    model = client.models.list().data[0].id
    start_s, first_s = time.monotonic(), None
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": given.question}],
        max_tokens=given.max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            if choice.delta.content:
                first_s = first_s if first_s is not None else time.monotonic() - start_s
                print(choice.delta.content, end="", flush=True)
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            cached = details.cached_tokens if details else None
            trace = (chunk.model_extra or {}).get("cpd", {})
            print(f"\n\nfirst token after {first_s or 0:.2f} s; {cached} of {chunk.usage.prompt_tokens} prompt tokens cached")
            print(f"{trace.get('route')}: {trace.get('reason')}")


if __name__ == "__main__":
    main()
