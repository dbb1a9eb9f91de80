"""Who follows whom, against a plain rule; and what is learnt of calls."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_compile.runtime.monitor import Monitor
from tessera_compile.runtime.ordering import MODEL, Learnt, Leaves, Ordering, versions_of


def conflict(a: dict, b: dict) -> bool:
    return any(key in b and (a[key] or b[key]) for key in a)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.dictionaries(st.integers(0, 3), st.booleans(), max_size=3), max_size=12),
    st.randoms(use_true_random=False),
)
def test_requests_go_when_no_earlier_one_is_in_conflict_with_them(uses, random):
    ordering, free, inside, coming = Ordering(), set(), {}, list(enumerate(uses))
    while coming or inside:
        what = random.random()
        if coming and what < 0.5:
            number, use = coming.pop(0)
            inside[number] = use
            if ordering.enter(number, use):
                free.add(number)
        elif inside and what < 0.6:
            number = random.choice(sorted(inside))
            use = {k: False for k in inside[number] if random.random() < 0.7}
            inside[number] = use
            found = ordering.relax(number, use)
            assert not free & set(found)
            free |= set(found)
        elif inside:
            number = random.choice(sorted(inside))
            del inside[number]
            free.discard(number)
            found = ordering.leave(number)
            assert not free & set(found)
            free |= set(found)
        expected = {n for n in inside if not any(m < n and conflict(inside[m], inside[n]) for m in inside)}
        assert free == expected
        assert len(ordering) == len(inside)


@dataclass
class Cache:
    layers: list = field(default_factory=list)


def test_the_first_call_of_a_kind_is_taken_to_write_all_and_then_it_is_known():
    learnt, x, cache = Learnt(), torch.zeros(2), torch.zeros(2)
    leaves = Leaves.of((x,), {"past": [cache], "n": 3})
    assert set(leaves.tensors) == {(0,), ("past", 0)}
    assert all(learnt.uses(leaves).values())
    before = versions_of(leaves)
    cache.add_(1)
    assert learnt.learn(leaves, before, [])
    uses = learnt.uses(Leaves.of((x,), {"past": [cache], "n": 4}))
    assert sorted(uses.values()) == [False, False, True]
    assert not uses[MODEL]
    # Another structure is another kind.
    assert all(learnt.uses(Leaves.of((x, x), {})).values())


def test_objects_that_hold_tensors_are_state_and_others_are_not():
    learnt, cache = Learnt(), Cache()
    leaves = Leaves.of((cache, Monitor()), {})
    assert len(leaves.objects) == 2
    assert len(learnt.uses(leaves)) == 3
    cache.layers.append(torch.zeros(1))
    learnt.learn(leaves, {}, [])
    assert set(learnt.uses(leaves)) == {MODEL, ("object", id(cache))}


def test_what_graphs_write_that_no_argument_holds_is_the_models():
    learnt, x, buffer = Learnt(), torch.zeros(2), torch.zeros(2)
    leaves = Leaves.of((x,), {})
    from tessera_compile.passes.torch_compat import storage_key

    learnt.learn(leaves, versions_of(leaves), [storage_key(buffer)])
    assert learnt.uses(leaves)[MODEL]


# The monitor


def test_the_monitor_changes_plan_at_beta_and_back_below_it_with_hysteresis():
    monitor = Monitor(window=1.0, beta=1.5)
    now = 0.0
    for _ in range(10):
        now += 0.2
        assert monitor.add(now - 1.0, now, 1.0) == "latency"
    while monitor.following == "latency":
        now += 0.2
        monitor.add(now - 3.0, now, 1.0)
        assert now < 5
    # Within a window of a switch nothing changes, however short the queue has become.
    switched = now
    while now < switched + 0.7:
        now += 0.2
        assert monitor.add(now - 1.0, now, 1.0) == "throughput"
    for _ in range(6):
        now += 0.2
        monitor.add(now - 3.0, now, 1.0)
    # Between 1.35 and 1.5 it stays with what it follows.
    for _ in range(20):
        now += 0.2
        assert monitor.add(now - 1.4, now, 1.0) == "throughput"
    for _ in range(20):
        now += 0.2
        monitor.add(now - 1.2, now, 1.0)
    assert monitor.following == "latency"
    assert monitor.switches == 2


def test_a_target_that_is_missed_is_a_reason_too():
    monitor = Monitor(window=1.0, beta=100.0, target=0.5)
    assert monitor.add(0.0, 0.4, 0.4) == "latency"
    assert monitor.add(0.0, 0.9, 0.9) == "latency"  # one of two: the p95 of few is the lower one
    for i in range(20):
        monitor.add(i, i + 0.9, 0.9)
    assert monitor.following == "throughput"
    for i in range(30, 50):
        monitor.add(i, i + 0.2, 0.2)
    assert monitor.following == "latency"
