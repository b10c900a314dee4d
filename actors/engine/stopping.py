"""When an answer ends: end tokens, stop tokens and its length.

Owns that rule alone (stop strings are text, and text is the router's). Invariant: no end or stop token counts at a position below
`min_tokens`, where the sampler does not choose one either.
"""

from __future__ import annotations

from collections.abc import Set

from cpd_ray.types import FinishReason, SamplingParams


def finish_reason(
    token: int, output_index: int, tokens_left: int, sampling: SamplingParams, eos_token_ids: Set[int]
) -> FinishReason | None:
    """Whether the answer ends with `token` at `output_index`, when `tokens_left` more may follow it. The token itself is part of the answer."""
    ends = token in sampling.stop_token_ids or (token in eos_token_ids and not sampling.ignore_eos)
    if ends and output_index >= sampling.min_tokens:
        return FinishReason.STOP
    return None if tokens_left > 0 else FinishReason.LENGTH
