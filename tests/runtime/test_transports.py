"""Values between lanes: bytes and order, for every transport; two slices of one GPU stand for two GPUs."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tessera_compile import make_cluster
from tessera_compile.passes.errors import ClusterError, TesseraWarning
from tessera_compile.ptx_tools.footprints import Box
from tessera_compile.runtime import transports
from tessera_compile.runtime.cuda_streams import LaneStreams, capturing, lane_streams
from tessera_compile.runtime.transports import (
    CHUNK,
    as_bytes,
    lies_closely,
    link_report,
    make_link,
    wait_value,
    with_measured_links,
    write_value,
)

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
NAMES = ("cuda:0/48sm", "cuda:0/64sm")
KINDS = [
    "peer", "kernel", "engine", "host", "gpu",
    pytest.param("nccl", marks=pytest.mark.skipif(importlib.util.find_spec("nccl") is None, reason="nccl4py is not installed")),
]  # fmt: skip


def on_gpu(function):
    for mark in gpu:
        function = mark(function)
    return function


def link(kind: str, back: bool = False):
    lanes = lane_streams(NAMES)
    return make_link(*(reversed(lanes) if back else lanes), kind)


def samples() -> dict[str, torch.Tensor]:
    def numbers(*shape, dtype=torch.float32):
        return torch.randn(*shape, device="cuda").to(dtype)

    whole = numbers(64, 96)
    return {
        "float": numbers(33, 7),
        "bool": numbers(1001) > 0,
        "complex": numbers(17, 5, dtype=torch.complex64),
        "conj": numbers(17, 5, dtype=torch.complex64).conj(),
        "negative": numbers(9, dtype=torch.complex64).conj().imag,
        "fp8": numbers(77).to(torch.float8_e4m3fn),
        "bf16": numbers(3, 5, 7, dtype=torch.bfloat16).transpose(0, 2),
        "int64": torch.arange(4099, device="cuda"),
        "scalar": numbers(1)[0],
        "empty": numbers(0, 4),
        "columns": whole[:, 3:50],
        "every other": whole[::2, ::3],
        "expanded": numbers(5, 1).expand(5, 9),
        "odd place": torch.randint(0, 256, (3 * CHUNK + 13,), dtype=torch.uint8, device="cuda")[5:],
        "channels last": numbers(2, 3, 8, 8).to(memory_format=torch.channels_last),
    }


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    assert (got.shape, got.stride(), got.dtype, got.is_conj(), got.is_neg()) == (
        want.shape, want.stride(), want.dtype, want.is_conj(), want.is_neg(),
    )  # fmt: skip
    if want.dtype == torch.float8_e4m3fn:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    return torch.equal(got.cpu(), want.cpu())


def test_bytes_of_tensors_that_lie_closely():
    x = torch.arange(24, dtype=torch.int16).view(4, 6)
    assert as_bytes(x.t()).tolist() == as_bytes(x).tolist() == list(x.numpy().tobytes())
    assert as_bytes(x[1:3]).data_ptr() == x.data_ptr() + 12
    assert as_bytes(x[2, 3]).numel() == 2
    assert all(map(lies_closely, (x, x.t(), x[1:3], x[2, 3], x[:, :0], x.view(2, 2, 6).transpose(0, 2))))
    assert not any(map(lies_closely, (x[:, 1:], x[::2], x[:1].expand(4, 6))))


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_what_arrives_is_what_was_sent(kind):
    way = link(kind)
    with torch.no_grad():
        sent = samples()
        ready = torch.cuda.current_stream().record_event()
        got = {name: way.fetch(value, ready) for name, value in sent.items()}
        target = torch.zeros(64, 96, device="cuda")
        free = torch.cuda.current_stream().record_event()
        updated = way.update(target[:, 3:50], sent["columns"], [ready, free])
        for name, (value, done) in got.items():
            done.synchronize()
            assert same(value, sent[name]), name
        updated.synchronize()
        assert torch.equal(target[:, 3:50], sent["columns"])
        assert int(torch.count_nonzero(target[:, :3])) == int(torch.count_nonzero(target[:, 50:])) == 0
    assert way.moved_bytes >= 3 * CHUNK


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_is_sent_behind_what_makes_it_and_read_behind_its_arrival(kind):
    way = link(kind)
    producer, consumer = way.source.compute, way.target.compute
    size = 300_000
    value = torch.zeros(size, device="cuda")
    torch.cuda.synchronize()
    sums = []
    for step in range(40):
        with torch.cuda.stream(producer):
            torch.cuda._sleep(300_000)
            value.fill_(step)
        got, done = way.fetch(value, producer.record_event())
        producer.wait_event(done)  # it is overwritten next
        consumer.wait_event(done)
        got.record_stream(consumer)
        with torch.cuda.stream(consumer):
            sums.append(got.sum())
    torch.cuda.synchronize()
    assert [float(s) for s in sums] == [float(size * step) for step in range(40)]


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_transfer_can_be_captured(kind):
    there, back = link(kind), link(kind, back=True)
    x = torch.randn(CHUNK // 2 + 3, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    assert there.busy == back.busy == {}
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        got, done = there.fetch(x, stream.record_event())
        stream.wait_event(done)
        got.record_stream(stream)
        y = got * 2
        final, done = back.fetch(y, stream.record_event())
        stream.wait_event(done)
        for way in (there, back):
            for event in way.drain():
                stream.wait_event(event)
    for step in range(5):
        x.fill_(step + 0.5)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(final, x * 2), step


@on_gpu
def test_two_graphs_hand_a_value_over_with_no_cpu_between():
    """The receiver's graph is launched first: its stream waits in GPU memory until the sender's kernel has raised the flag."""
    sender, receiver = lane_streams(NAMES)
    words = torch.zeros(64, dtype=torch.int32, device="cuda")
    arrived, flag = words[:1], words[32:33]
    source = torch.zeros(1 << 20, device="cuda")
    room, result = torch.zeros_like(source), torch.zeros_like(source)
    way = make_link(sender, receiver, "gpu")
    torch.cuda.synchronize()
    sends, receives = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(sends, stream=way.out, capture_error_mode="relaxed"):
        wait_value(way.out, flag, 0)
        torch.cuda._sleep(200_000)
        source.add_(1)
        transports._move(way, room, source, arrived, flag)
    with torch.cuda.graph(receives, stream=receiver.compute, capture_error_mode="relaxed"):
        wait_value(receiver.compute, flag, 1)
        torch.mul(room, 3, out=result)
        write_value(receiver.compute, flag, 0)
    torch.cuda.synchronize()
    for step in range(1, 50):
        first, second = ((receives, receiver.compute), (sends, way.out))
        if step % 3 == 0:
            first, second = second, first
        for graph, stream in (first, second):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, torch.full_like(result, 3.0 * step)), step


@on_gpu
def test_a_path_that_corrupts_is_replaced_by_the_host(monkeypatch):
    def flips(self, link, target, source):
        with torch.cuda.stream(link.into):
            target.copy_(source)
            target[-1:].add_(1)
        return link.into

    monkeypatch.setattr(transports, "_reports", {})
    for kind in (transports.Engine, transports.CopyKernel):
        monkeypatch.setattr(kind, "copy", flips)
        monkeypatch.setattr(kind, "near", None)
    with pytest.warns(TesseraWarning, match="did not arrive as it was sent"):
        way = link("auto")
    report = link_report(way.source, way.target, "auto")
    assert (report.chosen.transport, report.corrupt) == ("host", ("engine", "kernel"))
    monkeypatch.setattr(transports.Host, "copy", flips)
    monkeypatch.setattr(transports, "_reports", {})
    with pytest.raises(ClusterError, match="no value arrives from cuda:0 at cuda:0"):
        link("auto")


@on_gpu
def test_what_was_measured_of_a_link_is_told():
    way = link("auto")
    report = link_report(way.source, way.target)
    assert report.chosen.transport == "peer"
    assert {p.transport for p in report.tried} == {"engine", "kernel"}
    for captured in (False, True):
        path = report.chosen.path(captured)
        assert 0 < path.latency_us < 1e4
        assert path.gb_per_s > 1
    cluster = make_cluster(",".join(NAMES))
    measured = with_measured_links(cluster, "auto", captured=True)
    assert measured.links[NAMES] == report.chosen.path(True)
    assert measured.devices == cluster.devices


def test_nccl_says_what_is_missing(monkeypatch):
    transports._communicators.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "nccl.core", None)
    with pytest.raises(ClusterError, match="needs the package nccl4py"):
        transports._communicators((0,))


class _Stub:
    name = "host"


@pytest.mark.parametrize("wanted", ["auto", "peer", "gpu", "nccl"])
def test_what_is_chosen_where_a_path_corrupts(monkeypatch, wanted):
    """The choice alone, with no GPU: what `prove` says of each transport is given."""
    lane = LaneStreams(torch.device("cuda", 0), None, 8)
    stubbed = {
        "Host": _Stub,
        "Gpu": lambda _: type("G", (), {"name": "gpu"})(),
        "Nccl": lambda: type("N", (), {"name": "nccl"})(),
    }
    for name, stub in stubbed.items():
        monkeypatch.setattr(transports, name, stub)
    good = transports.Proven("host", dict.fromkeys(transports.SIZES, 5.0), dict.fromkeys(transports.SIZES, 4.0))
    monkeypatch.setattr(transports, "prove", lambda way: good if way.transport.name == "host" else None)
    way = transports.Link(lane, lane, None, None, transports.Engine())
    with pytest.warns(TesseraWarning, match="did not arrive as it was sent"):
        report, make = transports._choose(way, wanted)
    assert report.chosen is good
    assert report.corrupt == (("engine", "kernel") if wanted in ("auto", "peer") else (wanted,))
    assert make(way).name == "host"
    monkeypatch.setattr(transports, "prove", lambda way: None)
    with pytest.raises(ClusterError, match="no value arrives from cuda:0 at cuda:0"):
        transports._choose(way, wanted)


def test_the_faster_way_is_chosen_for_each_size(monkeypatch):
    lane = LaneStreams(torch.device("cuda", 0), None, 8)
    us = {"engine": (10.0, 10.0, 20.0, 500.0), "kernel": (4.0, 6.0, 30.0, 900.0)}
    issued = {"engine": (9.0, 9.0, 20.0, 500.0), "kernel": (12.0, 12.0, 30.0, 900.0)}

    def prove(way):
        name = way.transport.name
        sizes = transports.SIZES
        return transports.Proven(name, dict(zip(sizes, issued[name], strict=True)), dict(zip(sizes, us[name], strict=True)))

    monkeypatch.setattr(transports, "prove", prove)
    monkeypatch.setattr(transports, "_time", lambda way: dict.fromkeys(transports.SIZES, 9.0))
    monkeypatch.setattr(transports, "_time_captured", lambda way: dict.fromkeys(transports.SIZES, 4.0))
    way = transports.Link(lane, lane, None, None, transports.Engine())
    report, make = transports._choose(way, "auto")
    peer = make(way)
    assert (peer.most, peer.most_captured) == (0, transports.SIZES[1])
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert [peer._of(n).name for n in transports.SIZES] == ["engine"] * 4
    capturing = True
    assert [peer._of(n).name for n in transports.SIZES] == ["kernel", "kernel", "engine", "engine"]
    assert report.chosen.path(captured=True).latency_us == 4.0


@on_gpu
def test_memory_of_parts_is_kept_until_they_are_there():
    """What was sent in part is freed and its memory taken again while the link is still busy with something else."""
    path = link("auto")
    boxes = (Box(0, (64, 512), (2048, 1)), Box(1024, (64, 256), (2048, 1)))
    for _ in range(20):
        with torch.cuda.stream(path.source.compute):
            payload = torch.randn(64, 512, device="cuda")
            ready = path.source.compute.record_event()
        torch.cuda.synchronize()
        want = payload.cpu()
        for stream in (path.out, path.into):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(5_000_000)
        got, done = path.fetch_parts(payload, boxes, ready)
        del payload
        with torch.cuda.stream(path.source.compute):
            junk = [torch.full((64, 512), float("nan"), device="cuda") for _ in range(4)]
        done.synchronize()
        arrived = got.cpu()
        assert torch.equal(arrived[:, :128], want[:, :128])
        assert torch.equal(arrived[:, 256:320], want[:, 256:320])
        del junk


@on_gpu
@pytest.mark.parametrize("parts", [False, True])
def test_what_is_fetched_in_a_capture_lies_in_the_graphs_memory(parts):
    """Later allocations on the link's stream, from the general pool, do not get it."""
    path = link("auto")
    payload = torch.randn(96, 64, device="cuda").t()  # not contiguous
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with capturing(graph, stream):
        if parts:
            got, done = path.fetch_parts(payload, (Box(0, (payload.nbytes,), (1,)),), stream.record_event())
        else:
            got, done = path.fetch(payload, stream.record_event())
        stream.wait_event(done)
        result = got.clone()
        for event in path.drain():
            stream.wait_event(event)
    place = got.data_ptr()
    del got
    with torch.cuda.stream(path.into):
        later = [torch.empty(96 * 64, device="cuda") for _ in range(64)]
    assert all(t.data_ptr() != place for t in later)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, payload)
