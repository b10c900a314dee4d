"""What is compared: topologies of equal size, and the systems that run on them.

Invariant: the systems of one comparison use the same nodes, hardware, workload and seeds; they differ in what this table says only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from bench.sim.hardware import B200_TP4, LLAMA_70B, ModelShape, NodeModel


@dataclass(frozen=True, slots=True)
class Topology:
    """Nodes by role; a node runs one worker."""

    name: str
    pre_prefill: int
    prefill: int
    decode: int

    @property
    def nodes(self) -> int:
        return self.pre_prefill + self.prefill + self.decode


PD_2P1D = Topology("2P1D", 0, 2, 1)
PD_2P2D = Topology("2P2D", 0, 2, 2)
CPD_1D = Topology("CPD-1D", 1, 1, 1)
CPD_2D = Topology("CPD-2D", 1, 1, 2)


@dataclass(frozen=True, slots=True)
class System:
    """`policy`: a name of `placement.routing.registry`. `order`: the worker's scheduling. `shared`: workers read other nodes' slabs.
    `chunk_tokens`, `step_tokens`: a prompt's chunk when others wait, and when alone. 16,384 tokens is SGLang's default chunk on GPUs of more
    than 160 GB (its server_args.py, "B200, MI300"), the stack of most published P/D deployments; our own policy takes shorter ones.
    `turn_ahead`: contexts are brought back to a prefill pool between turns (`placement.turn_ahead`)."""

    name: str
    topology: Topology
    policy: str
    order: str
    shared: bool
    spill_after_s: float = 0.8
    chunk_tokens: int = 16384
    step_tokens: int = 16384
    aging_s: float = 10.0
    max_in_flight: int = 24
    turn_ahead: bool = False

    def on(self, topology: Topology) -> System:
        return replace(self, topology=topology)


SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        s.name: s
        for s in (
            System("pd_round_robin", PD_2P2D, "round_robin", "fcfs", shared=False),
            System("pd_affinity", PD_2P2D, "affinity", "fcfs", shared=False),
            System("pd_shared", PD_2P2D, "shared", "fcfs", shared=True),
            System("pd_best", PD_2P2D, "affinity_shared", "shortest", shared=True),
            System("cpd_threshold", CPD_2D, "threshold", "fcfs", shared=True),
            System("cpd_cost", CPD_2D, "cost", "shortest", shared=True, chunk_tokens=2048, step_tokens=4096, turn_ahead=True),
        )
    }
)
PLAIN = ("pd_round_robin", "pd_affinity", "pd_shared")
"""Plain P/D: what the best of is taken to compare with; `pd_best` is the honest best P/D."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Hardware, model, block size and the slabs' eviction policy. 512 tokens a block: the public traces' own, and a multiple of the 256 that
    flash-attention's paged kernels need. `eviction`: a name of `kv.eviction`; least recently used is the best of them for plain P/D on
    the agent mixes, so that the baselines have it too."""

    node: NodeModel = B200_TP4
    model: ModelShape = LLAMA_70B
    block_tokens: int = 512
    eviction: str = "lru"
