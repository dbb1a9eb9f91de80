"""What an engine says about itself: numbers, one line for a log, and Prometheus text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .passes.ir import format_bytes
from .runtime.pacing import Emulation


@dataclass(frozen=True)
class Record:
    """One request that was served: seconds that it waited and ran, and when after its arrival each of its tokens was made."""

    wait: float
    run: float
    tokens: tuple[float, ...] = ()


@dataclass(frozen=True)
class Percentiles:
    """In milliseconds; NaN where nothing was seen."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Percentiles:
        ordered = sorted(seconds)
        if not ordered:
            return cls(float("nan"), float("nan"), float("nan"))
        # The smallest value that at least so many of a hundred do not exceed.
        return cls(*(1e3 * ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in (50, 95, 99)))


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Times are of the last 4096 requests; on paced lanes they are emulated ones, divided by the factor.

    Attributes:
        queue_depth, in_flight: requests that wait and that run now.
        submitted, done, failed, cancelled, late, refused: requests so far; late ones ran out of time before they started.
        joined: requests that were run in one call with others.
        policy: the plan that is followed, and ``scheduling`` how: dynamic or static. ``switches``: changes of plan.
        wait, run, total: ms from submit to start, from start to end, and both.
        first_token, per_token: ms from submit to a request's first token, and between two, where requests say ``mark_token``.
        busy: share of the time that each lane was busy since the first graph ran. ``moved_bytes`` between lanes.
        replica_bytes: weights and state that lanes other than home hold.
        seconds: since the engine was made. ``emulation``: of paced lanes.
        periods: of CUDA lanes in static order, graphs of whole periods launched so far. ``uncaptured``: why segments or periods
            are not captured, by name (``periods`` itself, a segment's, or ``all``).
    """

    queue_depth: int
    in_flight: int
    submitted: int
    done: int
    failed: int
    cancelled: int
    late: int
    refused: int
    joined: int
    policy: str
    scheduling: str
    switches: int
    wait: Percentiles
    run: Percentiles
    total: Percentiles
    first_token: Percentiles
    per_token: Percentiles
    busy: Mapping[str, float]
    moved_bytes: int
    replica_bytes: int
    seconds: float
    emulation: Emulation | None = None
    periods: int = 0
    uncaptured: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        records: Sequence[Record],
        counts: Mapping[str, int],
        queue_depth: int,
        in_flight: int,
        policy: str,
        scheduling: str,
        switches: int,
        busy: Mapping[str, float],
        moved_bytes: int,
        replica_bytes: int,
        seconds: float,
        emulation: Emulation | None,
        periods: int = 0,
        uncaptured: Mapping[str, str] | None = None,
    ) -> EngineStats:
        return cls(
            queue_depth,
            in_flight,
            counts.get("submitted", 0),
            counts.get("done", 0),
            counts.get("failed", 0),
            counts.get("cancelled", 0),
            counts.get("late", 0),
            counts.get("refused", 0),
            counts.get("joined", 0),
            policy,
            scheduling,
            switches,
            Percentiles.of(r.wait for r in records),
            Percentiles.of(r.run for r in records),
            Percentiles.of(r.wait + r.run for r in records),
            Percentiles.of(r.tokens[0] for r in records if r.tokens),
            Percentiles.of(b - a for r in records for a, b in zip(r.tokens, r.tokens[1:], strict=False)),
            busy,
            moved_bytes,
            replica_bytes,
            seconds,
            emulation,
            periods,
            uncaptured or {},
        )

    def line(self) -> str:
        """One line for a log."""
        lanes = ", ".join(f"{name} {100 * share:.0f} %" for name, share in self.busy.items())
        text = (
            f"{self.done} done, {self.failed} failed, {self.cancelled} cancelled, {self.queue_depth} waiting, "
            f"{self.in_flight} running; {self.policy} plan, {self.scheduling}, {self.switches} switches; "
            f"ms waiting {self.wait.p50:.2f}/{self.wait.p99:.2f}, "
            f"running {self.run.p50:.2f}/{self.run.p99:.2f} (p50/p99); busy {lanes or '-'}; "
            f"{format_bytes(self.moved_bytes)} moved"
        )
        return text if self.emulation is None else f"{text}; {self.emulation.to_text()}"

    def __str__(self) -> str:
        return self.line()

    def to_prometheus(self) -> str:
        """Prometheus' text format, every name with the prefix ``tessera_``."""
        lines: list[str] = []

        def metric(name: str, kind: str, help: str, values: Mapping[str, float]) -> None:
            lines.append(f"# HELP tessera_{name} {help}")
            lines.append(f"# TYPE tessera_{name} {kind}")
            lines.extend(f"tessera_{name}{labels} {value:.9g}" for labels, value in values.items())

        metric("queue_depth", "gauge", "Requests that wait to start.", {"": self.queue_depth})
        metric("in_flight", "gauge", "Requests that run.", {"": self.in_flight})
        outcomes = ("done", "failed", "cancelled", "late", "refused")
        metric(
            "requests_total",
            "counter",
            "Requests by what became of them.",
            {f'{{outcome="{name}"}}': getattr(self, name) for name in outcomes},
        )
        metric("joined_requests_total", "counter", "Requests run in one call with others.", {"": self.joined})
        metric("policy_switches_total", "counter", "Changes of plan.", {"": self.switches})
        metric(
            "policy", "gauge", "1 for the plan that is followed.",
            {f'{{plan="{p}"}}': float(p == self.policy) for p in ("latency", "throughput")},
        )  # fmt: skip
        for name, help in (
            ("wait", "Seconds from submit to start."),
            ("run", "Seconds from start to end."),
            ("total", "Seconds from submit to end."),
            ("first_token", "Seconds from submit to the first token."),
            ("per_token", "Seconds between two tokens of a request."),
        ):
            found: Percentiles = getattr(self, name)
            quantiles = {"0.5": found.p50, "0.95": found.p95, "0.99": found.p99}
            metric(f"{name}_seconds", "gauge", help, {f'{{quantile="{q}"}}': ms / 1e3 for q, ms in quantiles.items()})
        metric(
            "lane_busy_ratio", "gauge", "Share of the time that a lane was busy.",
            {f'{{lane="{_escaped(name)}"}}': share for name, share in self.busy.items()},
        )  # fmt: skip
        metric("moved_bytes_total", "counter", "Bytes sent between lanes.", {"": self.moved_bytes})
        metric("replica_bytes", "gauge", "Weights and state held by lanes other than home.", {"": self.replica_bytes})
        return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
