"""The facts of the served model that the router needs: what identifies its KV, and its limits.

Invariant: two models (or dtypes, revisions, block sizes, salts, adapters) never share a root key.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpd_ray.errors import ContextLengthExceeded, InvalidRequest
from cpd_ray.ids import BlockKey
from cpd_ray.tokens import unpack
from cpd_ray.types import GenerateRequest
from kv.keys import root_key


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`identity` names the weights (id and revision); `kv_bytes_per_token` over all layers and heads; `max_tokens`: prompt plus answer."""

    name: str
    identity: str
    revision: str | None
    dtype: str
    block_tokens: int
    kv_bytes_per_token: int
    vocab_size: int
    max_tokens: int

    def root(self, adapter: str | None, salt: str | None) -> BlockKey:
        """The key before a prompt's first block."""
        return root_key(
            model=self.identity,
            revision=self.revision,
            dtype=self.dtype,
            block_size=self.block_tokens,
            adapter=adapter,
            salt=salt,
        )

    def check(self, request: GenerateRequest) -> None:
        """Raises InvalidRequest or ContextLengthExceeded for what no worker could answer."""
        total = request.prompt_tokens + request.sampling.max_tokens
        if total > self.max_tokens:
            raise ContextLengthExceeded(
                f"the model takes {self.max_tokens} tokens, but the prompt has {request.prompt_tokens} and max_tokens is "
                f"{request.sampling.max_tokens}: {total} in all; shorten the prompt or lower max_tokens",
                param="prompt",
            )
        self._in_vocabulary(max(unpack(request.tokens)), "prompt")
        if request.sampling.stop_token_ids:
            self._in_vocabulary(max(request.sampling.stop_token_ids), "stop_token_ids")
        if request.sampling.logit_bias:
            self._in_vocabulary(max(i for i, _ in request.sampling.logit_bias), "logit_bias")

    def _in_vocabulary(self, token: int, param: str) -> None:
        if token >= self.vocab_size:
            raise InvalidRequest(f"token id {token} is outside the model's vocabulary of {self.vocab_size}", param=param)
