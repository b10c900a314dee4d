"""A running system over HTTP, as commands ask it.

Owns the requests, and the way from a failure to one line that a person can act on. Invariant: only CPDErrors leave.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from cpd_ray import results
from cpd_ray.errors import ConfigError, CPDError, DeadlineExceeded, Unavailable

TIMEOUT_S = 600.0
CONNECT_S = 5.0


class Refused(CPDError):
    """The system answered with an error; the message is its own."""


class Api:
    """Use it in a `with` statement. `key`: an API key, or empty."""

    def __init__(self, url: str, key: str = "") -> None:
        self._url = url.rstrip("/")
        headers = {"X-CPD-Trace": "1", **({"Authorization": f"Bearer {key}"} if key else {})}
        try:
            self._http = httpx.Client(base_url=self._url, headers=headers, timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_S))
        except (httpx.InvalidURL, UnicodeError) as error:
            raise ConfigError(f"{url!r} is no URL: {error}") from error

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def status(self) -> results.SystemStatus:
        return results.status(self._ask("GET", "/v1/cpd/status"))

    def plan(self, body: Mapping[str, Any]) -> results.Plan:
        return results.plan(self._ask("POST", "/v1/cpd/plan", body))

    def warm(self, body: Mapping[str, Any]) -> results.Warmed:
        return results.warmed(self._ask("POST", "/v1/cpd/warm", body))

    def chat(self, body: Mapping[str, Any]) -> Generator[results.Chunk, None, None]:
        """A streamed chat; closing it ends the answer."""
        sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self._failures(), self._http.stream("POST", "/v1/chat/completions", json=sent) as response:
            if response.status_code != 200:
                response.read()
                raise _refusal(response)
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise Refused(str(event["error"]["message"]))
                yield results.chunk(event)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> results.Json:
        with self._failures():
            response = self._http.request(method, path, json=body)
            if response.status_code != 200:
                raise _refusal(response)
            answer: results.Json = response.json()
            return answer

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise Unavailable(
                f"nothing answers on {self._url}: start a system with `cpd-ray serve`, or say where one is with --url"
            ) from error
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"{self._url} did not answer in time") from error
        except httpx.UnsupportedProtocol as error:
            raise ConfigError(f"{self._url!r} is no URL: it must begin with http:// or https://") from error
        except httpx.HTTPError as error:
            raise Unavailable(f"the connection to {self._url} broke: {error}") from error
        except json.JSONDecodeError as error:
            raise Refused(f"what answers on {self._url} is no CPD system: its answer is not JSON") from error


def _refusal(response: httpx.Response) -> CPDError:
    """The error that an answer tells of."""
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{response.reason_phrase or 'an error'}: is this a CPD system?"
    if response.status_code in (401, 403):
        message += " (give a key with --key or CPD_API_KEY)"
    return Refused(f"{response.status_code}: {message}")


def body_of(text: str, *, chat: bool) -> dict[str, Any]:
    """A request body for what a command was given: the text, `-` for standard input, or `@FILE`."""
    given = sys.stdin.read() if text == "-" else text_of(text)
    return {"messages": [{"role": "user", "content": given}]} if chat else {"prompt": given}


def text_of(text: str) -> str:
    """The text, or what stands in the file of `@FILE`."""
    return read_text(Path(text[1:])) if text.startswith("@") else text


def read_text(file: Path) -> str:
    """Raises ConfigError for a file that can't be read as text."""
    try:
        return file.read_text()
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not text in UTF-8") from error
