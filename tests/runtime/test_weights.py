"""Copies of one weight, memory by memory, and what stands for it."""

import torch

from tessera_compile.passes import torch_compat
from tessera_compile.runtime.replicas import Replica, sight
from tessera_compile.runtime.weights import Weight, present, weight_of


def weight(values):
    reads = []

    def read():
        reads.append(True)
        return values

    (stand_in,) = torch_compat.stand_ins([values], torch.device("cpu"))
    return Weight(("w",), stand_in, read, 0), reads


def test_one_copy_a_memory_laid_out_as_in_the_model():
    made, reads = weight(torch.randn(3, 4).t())
    first = made.on("lane 0")
    assert made.on("lane 0") is first
    assert made.on("lane 1") is not first
    assert len(reads) == 2
    assert first.stride() == (1, 4)
    made.leave("lane 0")
    made.leave("lane 7")
    assert set(made.placed) == {"lane 1"}


def test_handles_and_copies_know_their_weight_and_state_does_not():
    values = torch.randn(3)
    made, _ = weight(values)
    assert weight_of(made.handle) is made
    assert weight_of(made.on("lane 1")) is weight_of(made.at_home("home")) is made
    assert torch.equal(present(made.handle), values)
    assert present(values) is values
    assert present(made.on("home")) is made.on("home")
    assert weight_of(values) is weight_of(3) is None
    state = made.make_state("home")
    assert state is made.make_state("home") is made.at_home("home")
    assert weight_of(state) is None
    assert not made.placed


def test_replicas_share_a_memorys_copy_until_the_weight_is_replaced():
    made, reads = weight(torch.zeros(3))
    first, second = Replica(memory="lane 1"), Replica(memory="lane 1")
    for replica in (first, second, first):
        replica.bring(sight(made.handle), volatile=False)
    assert first.tensor is second.tensor is made.placed["lane 1"]
    assert len(reads) == 1
    made.replace(lambda: torch.ones(3))
    first.bring(sight(made.handle), volatile=False)
    assert torch.equal(first.tensor, torch.ones(3))
    # A tensor of its own, when the weight has become state: the shared copy is not written.
    before = made.on("lane 1")
    state = torch.full((3,), 2.0)
    first.bring(sight(state), volatile=False)
    assert torch.equal(before, torch.ones(3))
    assert torch.equal(first.tensor, state)
    assert first.tensor is not state


def test_replacing_state_writes_into_it():
    made, _ = weight(torch.zeros(3))
    with torch.inference_mode():
        state = made.make_state("home")
    version = state._version
    made.replace(lambda: torch.ones(3))
    assert made.state is state
    assert torch.equal(state, torch.ones(3))
    assert state._version > version
