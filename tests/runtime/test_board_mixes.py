"""The board with requests of unlike length: pieces on links, and slack for the long ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tessera_compile.passes.ir import Lane, Out, Program, Recv, Run, Send
from tessera_compile.runtime.board import Board, Route, Ticket
from tessera_compile.runtime.simulator import drive


def crossing(name, us, move):
    """Makes a value on lane 1 and uses it on lane 0."""
    program = Program(
        (
            Lane(0, "d0", (Recv(name, 1), Run(f"{name}-use", ("b",)), Out(()))),
            Lane(1, "d1", (Run(f"{name}-make", ("a",)), Send(name, 0))),
        )
    )
    times = {f"{name}-make": us, f"{name}-use": us}
    starts = {f"{name}-make": 0.0, f"{name}->0": us, f"{name}-use": us + move}
    return Route(program, times, lambda *_: move, starts, period=max(us, move), alone=2 * us + move)


def ends(routes, inflight=8, order="due", arrivals=None):
    ran = drive(lambda n: [routes[n]], arrivals or [0.0] * len(routes), lanes=2, inflight=inflight, order=order)
    return [p.finish for p in ran.passages]


@pytest.mark.parametrize("order", ["due", "age", "fifo", "static"])
def test_one_transfer_takes_the_same_in_pieces(order):
    whole = crossing("v", 10.0, 1000.0)
    assert ends([replace(whole, piece=7.0)], order=order) == pytest.approx([1020.0])
    assert ends([whole], order=order) == pytest.approx([1020.0])


def test_a_short_request_passes_the_long_transfer_of_another():
    long, short = crossing("v", 10.0, 1000.0), crossing("w", 10.0, 5.0)
    # A first short one, so that it is known what is short; the long one's value goes from 20 on; the other's is made at 110.
    assert ends([short, long, short], arrivals=[0.0, 0.0, 100.0]) == pytest.approx([25.0, 1030.0, 1040.0])
    # In pieces: the other's goes after the piece that ends at 120.
    routes = [replace(r, piece=100.0) for r in (short, long, short)]
    assert ends(routes, arrivals=[0.0, 0.0, 100.0]) == pytest.approx([25.0, 1035.0, 135.0])


def test_strictly_by_the_steady_state_values_go_whole():
    long, short = (replace(crossing(n, 10.0, us), piece=100.0) for n, us in (("v", 1000.0), ("w", 5.0)))
    first, second = ends([long, short], order="static")
    assert second > first


def chain(name, count, us):
    program = Program((Lane(0, "d0", (*(Run(f"{name}{i}", (f"k{i}",)) for i in range(count)), Out(()))),))
    starts = {f"{name}{i}": i * us for i in range(count)}
    return Route(program, dict.fromkeys(starts, us), starts=starts, period=count * us, alone=count * us)


def test_short_requests_go_before_a_long_one_that_has_slack_and_do_not_starve_it():
    long, short = chain("p", 100, 10.0), chain("d", 1, 10.0)
    routes = [short, long, *([short] * 400)]
    ran = drive(lambda n: [routes[n]], [0.0] * len(routes), lanes=1, inflight=4)
    assert math.isclose(max(p.finish for p in ran.passages), 5010.0)  # The lane was never idle.
    waits = [p.finish - p.start for p in ran.passages[2:]]
    assert sorted(waits)[len(waits) // 2] <= 50.0  # Three short ones and one long one's segment.
    assert 1100.0 < ran.passages[1].finish < 5000.0  # It waits for some, not for all.


def test_equal_requests_have_no_slack_over_each_other():
    board = Board(1, "due")
    route = chain("d", 2, 10.0)
    for number in range(3):
        board.admit(Ticket(number, route), 0.0)
    assert [t.base for t in board.tickets] == [0.0, 20.0, 40.0]
    assert [t.slack for t in board.tickets] == [0.0] * 3
