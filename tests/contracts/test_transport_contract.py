"""Every transport keeps the same promises: in one process, over NIXL through shared memory, and over NIXL through TCP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from cpd_ray.errors import KVError, LayoutMismatch, PeerGone, StaleRegion, TransferFailed
from cpd_ray.messages import RegionRef
from kv.memory import SlottedMemory
from kv.transport.base import Span, StillMoving, Transport
from tests.contracts.transport_peers import SLOT_BYTES, SLOTS, Far, InOneProcess, NearAndFar, OverNixl, pattern

POOL_SLOTS = 80
FAR = RegionRef("far", "slab", 1)
POOL = RegionRef("near", "pool", 1)


class Pool:
    """Where reads land."""

    def __init__(self, transport: Transport) -> None:
        self.rows = np.zeros((POOL_SLOTS, SLOT_BYTES), dtype=np.uint8)
        transport.register("pool", SlottedMemory.over([self.rows[:30], self.rows[30:]], SLOT_BYTES), 1)


@pytest.fixture(params=["inprocess", "nixl", "nixl-tcp"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NearAndFar:
    if request.param == "inprocess":
        return InOneProcess()
    if request.param == "nixl-tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    return OverNixl(tcp=request.param == "nixl-tcp")


@pytest.fixture
def near(ends: NearAndFar) -> Iterator[Transport]:
    transport = ends.near()
    yield transport
    transport.close()


@pytest.fixture
def far(ends: NearAndFar) -> Iterator[Far]:
    peer = ends.lend_far()
    yield peer
    ends.take_back(peer)


@pytest.fixture(scope="module", autouse=True)
def _processes() -> Iterator[None]:
    yield
    OverNixl.close_spare()


async def until_settled(moving: StillMoving) -> None:
    async with asyncio.timeout(120):
        while not moving.settled():  # noqa: ASYNC110 - `settled` is there to be polled
            await asyncio.sleep(0)


async def read_until_it_fails(near: Transport, slot: int) -> None:
    """Shared memory of the dead stays readable until UCX has noticed."""
    async with asyncio.timeout(120):
        while True:
            await near.read(FAR, [slot], POOL, [slot], timeout_s=30)


async def test_random_reads_equal_a_loop_over_rows(near: Transport, far: Far) -> None:
    pool = Pool(near)
    near.connect(far.describe())
    rng = np.random.default_rng(7)
    expected = pool.rows.copy()
    for _ in range(20):
        count = int(rng.integers(0, SLOTS + 1))
        source = rng.permutation(SLOTS)[:count] if rng.random() < 0.5 else np.arange(count)
        into = rng.permutation(POOL_SLOTS)[:count] if rng.random() < 0.5 else np.arange(count)
        await near.read(FAR, source.tolist(), POOL, into.tolist(), timeout_s=30)
        for a, b in zip(source.tolist(), into.tolist(), strict=True):
            expected[b] = pattern(a)
        assert (pool.rows == expected).all()


async def test_many_reads_at_once(near: Transport, far: Far) -> None:
    pool = Pool(near)
    near.connect(far.describe())
    await asyncio.gather(*(near.read(FAR, [i], POOL, [POOL_SLOTS - 1 - i], timeout_s=30) for i in range(SLOTS)))
    assert all((pool.rows[POOL_SLOTS - 1 - i] == pattern(i)).all() for i in range(SLOTS))


async def test_spans_move_a_part_of_each_slot(near: Transport, far: Far) -> None:
    pool = Pool(near)
    near.connect(far.describe())
    await near.read(
        FAR, [41, 5, 6], POOL, [0, 29, 30], timeout_s=30, source_span=Span(1024, 512), into_span=Span(SLOT_BYTES - 512, 512)
    )
    expected = np.zeros_like(pool.rows)
    for a, b in ((41, 0), (5, 29), (6, 30)):
        expected[b, -512:] = pattern(a)[1024:1536]
    assert (pool.rows == expected).all()


async def test_a_slot_of_another_size_takes_a_span_of_the_same_length(near: Transport, far: Far) -> None:
    half = np.zeros((8, SLOT_BYTES // 2), dtype=np.uint8)
    into = near.register("halves", SlottedMemory.over([half], SLOT_BYTES // 2), 1)
    near.connect(far.describe())
    with pytest.raises(TransferFailed):
        await near.read(FAR, [3], into, [1], timeout_s=30)
    await near.read(FAR, [3], into, [1], timeout_s=30, source_span=Span(SLOT_BYTES // 2, SLOT_BYTES // 2))
    assert (half[1] == pattern(3)[SLOT_BYTES // 2 :]).all()
    assert not half[[0, *range(2, 8)]].any()


async def test_what_does_not_fit_is_refused_before_a_byte_moves(near: Transport, far: Far) -> None:
    pool = Pool(near)
    near.connect(far.describe())
    for source, into in (([SLOTS], [0]), ([-1], [0]), ([0], [POOL_SLOTS]), ([0, 1], [0]), ([0, 1], [2, 2])):
        with pytest.raises(TransferFailed):
            await near.read(FAR, source, POOL, into, timeout_s=30)
    for span in (Span(-1, 4), Span(0, 0), Span(SLOT_BYTES - 4, 8)):
        with pytest.raises(TransferFailed):
            await near.read(FAR, [0], POOL, [0], timeout_s=30, source_span=span, into_span=span)
    assert not pool.rows.any()


async def test_a_peer_with_another_layout_is_refused(ends: NearAndFar, far: Far) -> None:
    near = ends.near(b"another layout")
    try:
        Pool(near)
        with pytest.raises(LayoutMismatch):
            near.connect(far.describe())
        with pytest.raises(PeerGone):
            await near.read(FAR, [0], POOL, [0], timeout_s=30)
    finally:
        near.close()


async def test_a_description_that_contradicts_itself_is_refused(near: Transport, far: Far) -> None:
    described = far.describe()
    region = described.regions[0]
    for wrong in (
        replace(region, extent_slots=region.extent_slots[:1]),
        replace(region, slot_bytes=0),
        replace(region, ref=replace(region.ref, peer="another")),
    ):
        with pytest.raises(LayoutMismatch):
            near.connect(replace(described, regions=(wrong,)))
    with pytest.raises(LayoutMismatch):
        near.connect(replace(described, transport="pigeons"))


async def test_a_region_of_another_generation_is_stale(near: Transport, far: Far) -> None:
    pool = Pool(near)
    near.connect(far.describe())
    for ref in (replace(FAR, generation=2), replace(FAR, region="other")):
        with pytest.raises(StaleRegion):
            await near.read(ref, [0], POOL, [0], timeout_s=30)
    with pytest.raises(StaleRegion):
        await near.read(FAR, [0], replace(POOL, generation=2), [0], timeout_s=30)
    far.register_anew(seed=5, generation=2)
    near.connect(far.describe())
    with pytest.raises(StaleRegion):
        await near.read(FAR, [0], POOL, [0], timeout_s=30)
    await near.read(replace(FAR, generation=2), [9], POOL, [4], timeout_s=30)
    assert (pool.rows[4] == pattern(9, seed=5)).all()


def test_registering_the_same_generation_twice_is_a_bug(near: Transport) -> None:
    Pool(near)
    with pytest.raises(ValueError, match="generation"):
        Pool(near)


async def test_a_stranger_cannot_be_read(near: Transport) -> None:
    Pool(near)
    with pytest.raises(PeerGone):
        await near.read(FAR, [0], POOL, [0], timeout_s=30)
    near.disconnect("far")


async def test_a_disconnected_peer_can_be_connected_again(near: Transport, far: Far) -> None:
    pool = Pool(near)
    for _ in range(3):
        near.connect(far.describe())
        near.disconnect("far")
        with pytest.raises(PeerGone):
            await near.read(FAR, [0], POOL, [0], timeout_s=30)
    near.connect(far.describe())
    await near.read(FAR, [63], POOL, [63], timeout_s=30)
    assert (pool.rows[63] == pattern(63)).all()


async def test_a_dead_peer_is_gone_and_comes_back_under_its_name(near: Transport, far: Far) -> None:
    pool = Pool(near)
    near.connect(far.describe())
    await near.read(FAR, [0], POOL, [0], timeout_s=30)
    far.kill()
    with pytest.raises(PeerGone):
        await read_until_it_fails(near, 1)
    far.restart(seed=3, generation=2)
    near.connect(far.describe())
    await near.read(replace(FAR, generation=2), list(range(SLOTS)), POOL, list(range(SLOTS)), timeout_s=30)
    assert all((pool.rows[i] == pattern(i, seed=3)).all() for i in range(SLOTS))


async def test_a_frozen_peer_leaves_the_read_moving_until_it_thaws(near: Transport, far: Far) -> None:
    pool = Pool(near)
    near.connect(far.describe())
    await near.read(FAR, [0], POOL, [0], timeout_s=30)
    far.freeze()
    try:
        if not far.freezes:
            await near.read(FAR, [7], POOL, [7], timeout_s=30)
        else:
            with pytest.raises(StillMoving) as late:
                await near.read(FAR, [7], POOL, [7], timeout_s=0.05)
            assert not late.value.settled()
            assert not pool.rows[7].any()
    finally:
        far.thaw()
    if far.freezes:
        await until_settled(late.value)
    assert (pool.rows[7] == pattern(7)).all()
    await near.read(FAR, [8], POOL, [8], timeout_s=30)
    assert (pool.rows[8] == pattern(8)).all()


async def test_a_peer_that_dies_frozen_settles_its_reads(near: Transport, far: Far) -> None:
    Pool(near)
    near.connect(far.describe())
    await near.read(FAR, [0], POOL, [0], timeout_s=30)
    if not far.freezes:
        pytest.skip("reads through shared memory do not need the peer to run")
    far.freeze()
    with pytest.raises(StillMoving) as late:
        await near.read(FAR, [7], POOL, [7], timeout_s=0.05)
    far.kill()
    await until_settled(late.value)
    with pytest.raises(PeerGone):
        await near.read(FAR, [7], POOL, [7], timeout_s=30)
    far.restart(seed=4, generation=2)
    near.connect(far.describe())
    await near.read(replace(FAR, generation=2), [7], POOL, [7], timeout_s=30)


async def test_frozen_reads_do_not_hold_up_other_peers(near: Transport, far: Far) -> None:
    pool = Pool(near)
    near.connect(far.describe())
    await near.read(FAR, [0], POOL, [0], timeout_s=30)
    if not far.freezes:
        pytest.skip("reads through shared memory do not need the peer to run")
    far.freeze()
    late = await asyncio.gather(*(near.read(FAR, [i], POOL, [i], timeout_s=0.05) for i in range(1, 21)), return_exceptions=True)
    assert all(isinstance(error, KVError) for error in late)
    far.thaw()
    for error in late:
        if isinstance(error, StillMoving):
            await until_settled(error)
    await near.read(FAR, [30], POOL, [30], timeout_s=30)
    assert (pool.rows[30] == pattern(30)).all()


async def test_a_cancelled_read_ends_only_when_nothing_moves_or_says_so(near: Transport, far: Far) -> None:
    pool = Pool(near)
    near.connect(far.describe())
    await near.read(FAR, [0], POOL, [0], timeout_s=30)
    reading = asyncio.ensure_future(near.read(FAR, list(range(SLOTS)), POOL, list(range(SLOTS)), timeout_s=30))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    before = pool.rows.copy()
    await near.read(FAR, [70 - SLOTS], POOL, [POOL_SLOTS - 1], timeout_s=30)
    assert (pool.rows[:SLOTS] == before[:SLOTS]).all()
    if far.freezes:
        far.freeze()
        reading = asyncio.ensure_future(near.read(FAR, [9], POOL, [9], timeout_s=0.05))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises((StillMoving, asyncio.CancelledError)) as late:
            await reading
        far.thaw()
        if isinstance(late.value, StillMoving):
            await until_settled(late.value)


async def test_nothing_lands_after_close(ends: NearAndFar, far: Far) -> None:
    near = ends.near()
    pool = Pool(near)
    near.connect(far.describe())
    await near.read(FAR, [0], POOL, [0], timeout_s=30)
    late = None
    if far.freezes:
        far.freeze()
        with pytest.raises(StillMoving) as late:
            await near.read(FAR, list(range(SLOTS)), POOL, list(range(SLOTS)), timeout_s=0.05)
    near.close()
    if late is not None:
        await until_settled(late.value)
    before = pool.rows.copy()
    far.run_on()
    assert (pool.rows == before).all()
    with pytest.raises(KVError):
        await near.read(FAR, [1], POOL, [1], timeout_s=30)
    near.close()
