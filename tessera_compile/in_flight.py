"""Which of several plans of a mix serves most with so many requests in flight: in simulated time, on the engine's own board."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .passes.ir import Run
from .runtime.board import Order, Route, Step
from .runtime.simulator import drive

#: Of a mixture's plans: the share of the requests, and the route of each workload.
Shared = Sequence[tuple[float, Mapping[str, Route]]]


def simulated_us(
    plans: Shared, uses: Mapping[str, float], *, lanes: int, inflight: int, mixes: float = 6.0, order: Order = "due"
) -> float:
    """µs for one mix in the steady state, of requests that wait in one queue, each workload spread evenly.

    Args:
        plans: whose routes have modelled times (µs).
        uses: workload → requests of it in one mix.
        mixes: how many are sent. Measured is what the lanes compute in the middle half of the time.
    """
    kinds = _turns(uses, mixes)
    served: dict[str, list[int]] = {kind: [0] * len(plans) for kind in uses}

    def choose(number: int) -> list[Route]:
        kind = kinds[number]
        so_far, total = served[kind], sum(served[kind]) + 1
        turn = max(range(len(plans)), key=lambda i: (plans[i][0] * total - so_far[i], -i))
        so_far[turn] += 1
        return [plans[turn][1][kind]]

    ran: list[tuple[float, float]] = []

    def watch(step: Step) -> None:
        times = step.ticket.route.run_time
        if isinstance(step.instruction, Run) and times is not None:
            ran.append((step.start, step.start + times[step.instruction.segment]))

    drive(choose, [0.0] * len(kinds), lanes=lanes, inflight=inflight, order=order, watch=watch)
    end = max((finish for _, finish in ran), default=0.0)
    start, stop = end / 4, 3 * end / 4
    computed = sum(max(0.0, min(finish, stop) - max(begin, start)) for begin, finish in ran)
    asked = sum(share * uses[kind] * _compute(routes[kind]) for share, routes in plans for kind in uses)
    return (stop - start) * asked / computed if computed else 0.0


def _turns(uses: Mapping[str, float], mixes: float) -> list[str]:
    """The kind of each request, each workload spread evenly over every mix."""
    due = [((i + 0.5) / n, kind) for kind, n in uses.items() for i in range(round(n * mixes))]
    return [kind for _, kind in sorted(due)]


def _compute(route: Route) -> float:
    """µs on all lanes together."""
    assert route.run_time is not None
    return sum(route.run_time.values())
