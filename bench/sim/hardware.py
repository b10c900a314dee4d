"""What the machines can do: stated peak rates, a stated efficiency for each use, and the step times that follow.

Owns no policy and no state. Every figure has its source beside it; none is fitted to a result of the simulator.
Invariant: a time is bytes or floating-point operations over peak times efficiency, plus a fixed overhead a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpd_ray.messages import StepCost

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention. `weight_bytes` and `kv_bytes`: of one element."""

    name: str
    parameters: float
    layers: int
    query_width: int
    kv_heads: int
    head_dim: int
    weight_bytes: int
    kv_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """KV of one token."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def flop_per_token(self) -> float:
        """Matrix products of the weights."""
        return 2 * self.parameters

    @property
    def flop_per_pair(self) -> float:
        """Attention of one new token to one token before it: scores and weighted sum."""
        return 4 * self.layers * self.query_width


# Llama 3.1 70B: its published config.json (80 layers, hidden 8192, 64 query heads, 8 KV heads of 128), bf16 weights and KV
LLAMA_70B = ModelShape("llama-3.1-70b bf16", 70.6e9, 80, 8192, 8, 128, 2, 2)
# SmolLM2-135M: its published config.json (30 layers, hidden 576, 9 query heads, 3 KV heads of 64), bf16
SMOLLM2 = ModelShape("smollm2-135m bf16", 134.5e6, 30, 576, 3, 64, 2, 2)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the peak that are reached: `prefill` of the floating-point rate, `decode` of the memory rate, `host` and `network` of
    the links."""

    prefill: float
    decode: float
    host: float
    network: float


@dataclass(frozen=True, slots=True)
class NodeModel:
    """One node, all its accelerators together (a worker spans the node). Rates are per second. `memory_bytes` holds weights, KV and
    `reserve_bytes` for activations. `slab_bytes`: DRAM given to the cache. `step_s`: fixed cost of a step (launches, scheduling,
    latency of the collectives); `face_s`: tokenising, routing and sampling on the way to the first token."""

    name: str
    gpus: int
    flops: float
    memory_bytes_per_s: float
    memory_bytes: float
    reserve_bytes: float
    host_bytes_per_s: float
    network_bytes_per_s: float
    slab_bytes: float
    step_s: float
    face_s: float
    efficiency: Efficiency

    def prefill_cost(self, model: ModelShape) -> StepCost:
        """Compute-bound: the weights' products for each new token, attention for each pair."""
        rate = self.flops * self.efficiency.prefill
        return StepCost(self.step_s, model.flop_per_token / rate, model.flop_per_pair / rate, 0.0, samples=1)

    def decode_cost(self, model: ModelShape) -> StepCost:
        """Memory-bound: weights once a step, each sequence's KV once; `attention` counts context tokens when each has one new token."""
        rate = self.memory_bytes_per_s * self.efficiency.decode
        weights_s = model.parameters * model.weight_bytes / rate
        # the products of one more row in the batch, at the prefill rate: what decode pays when its batch grows
        per_token = model.flop_per_token / (self.flops * self.efficiency.prefill)
        return StepCost(self.step_s + weights_s, per_token, model.bytes_per_token / rate, 0.0, samples=1)

    def pool_blocks(self, model: ModelShape, block_tokens: int) -> int:
        """Blocks of KV beside weights and activations."""
        room = self.memory_bytes - self.reserve_bytes - model.parameters * model.weight_bytes
        blocks = int(room // (model.bytes_per_token * block_tokens))
        if blocks < 1:
            raise ValueError(f"{self.name} has no room for KV beside {model.name}")
        return blocks

    def slab_blocks(self, model: ModelShape, block_tokens: int) -> int:
        return max(1, int(self.slab_bytes // (model.bytes_per_token * block_tokens)))

    @property
    def host_rate(self) -> float:
        """Between a worker's pool and its node's slab, each way."""
        return self.host_bytes_per_s * self.efficiency.host

    @property
    def network_rate(self) -> float:
        """Into or out of the node."""
        return self.network_bytes_per_s * self.efficiency.network


# Peaks, NVIDIA DGX B200 datasheet (8 GPUs): 36 PFLOPS dense bf16 with sparsity, that is 2.25 dense a GPU; 64 TB/s and 1,440 GB of
# HBM3e; ConnectX-7 at 400 Gb/s a GPU. PCIe 5.0 x16: 64 GB/s a GPU and direction.
# Efficiencies: prefill 0.5 (large bf16 products reach 0.6-0.75 of the peak and FlashAttention-4 reports 0.71 on B200; all-reduces of
# tensor parallelism over four GPUs and everything between the products take the rest); decode 0.7 of HBM's rate (paged attention
# kernels report 0.7-0.85); PCIe 0.8 and RDMA 0.85 of the line rate (protocol overhead of large messages).
_B200 = Efficiency(prefill=0.5, decode=0.7, host=0.8, network=0.85)
B200_TP4 = NodeModel(
    name="4xB200",
    gpus=4,
    flops=4 * 2.25e15,
    memory_bytes_per_s=4 * 8e12,
    memory_bytes=4 * 180e9,
    reserve_bytes=4 * 32e9,  # activations and buffers: what SGLang leaves by default on such GPUs
    host_bytes_per_s=4 * 64e9,
    network_bytes_per_s=4 * 50e9,
    slab_bytes=1024 * GIB,  # half of the 2 TB that such nodes are commonly sold with
    step_s=0.005,  # about 1,000 kernels and 160 all-reduces a step, launched from graphs
    face_s=0.010,
    efficiency=_B200,
)

# NVIDIA H200 SXM datasheet: 989 TFLOPS dense bf16, 4.8 TB/s, 141 GB; links as above. Prefill 0.55: Hopper's kernels are closer to
# their (lower) peak than Blackwell's to theirs.
H200_TP4 = NodeModel(
    name="4xH200",
    gpus=4,
    flops=4 * 0.989e15,
    memory_bytes_per_s=4 * 4.8e12,
    memory_bytes=4 * 141e9,
    reserve_bytes=4 * 14e9,  # SGLang's default here
    host_bytes_per_s=4 * 64e9,
    network_bytes_per_s=4 * 50e9,
    slab_bytes=1024 * GIB,
    step_s=0.005,
    face_s=0.010,
    efficiency=Efficiency(prefill=0.55, decode=0.7, host=0.8, network=0.85),
)


def this_machine(prefill_tokens_per_s: float, decode_step_s: float, memcpy_bytes_per_s: float) -> NodeModel:
    """The machine at hand, from three measurements of `bench.micro.engine` and `bench.micro.kv`: here nothing is a peak, so every
    efficiency is 1. One node is one process on this machine; the network is the shared memory between processes."""
    for name, value in (
        ("prefill rate", prefill_tokens_per_s),
        ("decode step", decode_step_s),
        ("memory rate", memcpy_bytes_per_s),
    ):
        if not 0 < value < float("inf"):
            raise ValueError(f"a {name} of {value} can't be")
    flops = prefill_tokens_per_s * SMOLLM2.flop_per_token
    weights_bytes = SMOLLM2.parameters * SMOLLM2.weight_bytes
    return NodeModel(
        name="this machine",
        gpus=1,
        flops=flops,
        memory_bytes_per_s=weights_bytes / decode_step_s,
        memory_bytes=weights_bytes + 32_768 * SMOLLM2.bytes_per_token,
        reserve_bytes=0,
        host_bytes_per_s=memcpy_bytes_per_s,
        network_bytes_per_s=memcpy_bytes_per_s / 2,
        slab_bytes=1 * GIB,
        step_s=0.001,
        face_s=0.015,
        efficiency=Efficiency(1.0, 1.0, 1.0, 1.0),
    )


NODE_MODELS = {"b200": (B200_TP4, LLAMA_70B), "h200": (H200_TP4, LLAMA_70B)}
