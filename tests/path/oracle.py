"""What the whole path is compared with: transformers' own generate, in fp32, one request at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

DOCUMENT = Path(__file__).resolve().parents[2] / "LICENSE"


class Oracle:
    """The stock model in fp32."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.eval()

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The greedy answer's tokens, end token included."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
            )
        return out[0, len(prompt) :].tolist()
