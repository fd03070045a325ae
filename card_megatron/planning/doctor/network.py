"""Between ranks: names, clocks, a shared run directory, and bandwidths against what the links should give.

Every rank calls everything, in the same order. Bandwidths of all-reduces are bus bandwidths, as nccl-tests defines
them: 2 (n - 1) / n times the bytes over the time, which is what each link carries whatever the number of ranks.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from card_megatron.planning.doctor.check import Check, judged
from card_megatron.planning.doctor.expected import Link, expected_link
from card_megatron.planning.doctor.storage import existing

GB = 1e9
SKEW_WARN, SKEW_FAIL = 1.0, 60.0
"""Seconds. Logs of several hosts are read side by side; the watchdog compares heartbeats by the clock."""
ROUNDS = 5


def network_checks(run_dir: Path, megabytes: int) -> list[Check]:
    """What this rank has to say; figures that belong to a pair or to all ranks come from one of them."""
    hosts = gather(socket.gethostname())
    checks = [*name_checks(hosts), shared_folder(run_dir, hosts)]
    offsets = clock_offsets()
    if dist.get_rank() == 0:
        checks.append(clock_check(offsets, hosts))
    if len(hosts) > 1:
        checks += [*all_reduce_checks(hosts, megabytes), *pair_checks(hosts, megabytes)]
    return checks


def gather(value: object) -> list:
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


# ---------------------------------------------------------------- names, clocks, folders


def name_checks(hosts: Sequence[str]) -> Iterator[Check]:
    """gloo binds to the address of the own host's name; MPI and debuggers use the others'."""
    own = socket.gethostname()
    unknown = [host for host in dict.fromkeys(hosts) if not resolves(host)]
    if own in unknown:
        remedy = f"add {own} to /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the right interface"
        yield Check("network", "own host name", f"{own} has no address", "resolves", "fail", remedy)
    others = [host for host in unknown if host != own]
    if others:
        remedy = "see to /etc/hosts or DNS; MASTER_ADDR must at least resolve"
        yield Check("network", "host names", f"no address: {', '.join(others[:8])}", "all resolve", "warn", remedy)
    if not unknown:
        yield Check("network", "host names", f"{len(hosts)} ranks, {len(set(hosts))} host name(s)", "all resolve")


def resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def shared_folder(run_dir: Path, hosts: Sequence[str]) -> Check:
    """A checkpoint that is written to the disks of several hosts is no checkpoint."""
    name = [f".doctor-{uuid.uuid4().hex[:8]}"]
    dist.broadcast_object_list(name, src=0)
    path = run_dir / name[0]
    problem = ""
    with contextlib.ExitStack() as stack:
        try:
            if dist.get_rank() == 0:
                stack.enter_context(existing(run_dir))
                path.touch()
                stack.callback(path.unlink)
        except OSError as error:
            problem = f"rank 0 cannot write: {error.strerror}"
        dist.barrier()
        seen = _appears(path)
        dist.barrier()
    if seen:
        return Check("network", "run directory on all hosts", "shared" if len(set(hosts)) > 1 else "one host", "shared")
    remedy = "put run_dir on a file system that all hosts mount"
    return Check(
        "network", "run directory on all hosts", problem or f"{run_dir} is not shared", "shared", "fail", remedy
    )


def _appears(path: Path, seconds: float = 5.0) -> bool:
    """A network file system may take a moment to show another host's file."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def clock_offsets() -> list[float]:
    """Each rank's clock minus rank 0's, in seconds: read by all after a barrier, the median of several rounds."""
    rounds = []
    for _ in range(ROUNDS):
        dist.barrier()
        rounds.append(gather_floats(time.time()))
    return [statistics.median(times[rank] - times[0] for times in rounds) for rank in range(dist.get_world_size())]


def gather_floats(value: float) -> list[float]:
    mine = torch.tensor([value], dtype=torch.float64, device=device())
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [float(one) for one in everyone]


def clock_check(offsets: Sequence[float], hosts: Sequence[str]) -> Check:
    """Pure: the two clocks that are furthest apart; the one that is alone in its opinion is named, or both."""
    first = min(range(len(offsets)), key=lambda rank: offsets[rank])
    last = max(range(len(offsets)), key=lambda rank: offsets[rank])
    apart = offsets[last] - offsets[first]
    verdict = "fail" if apart > SKEW_FAIL else "warn" if apart > SKEW_WARN else "ok"
    middle = statistics.median(offsets)
    off = {rank: abs(offsets[rank] - middle) for rank in (first, last)}
    wrong = [rank for rank in sorted(off) if off[rank] > 0.9 * max(off.values())]
    where = " and ".join(f"rank {rank} on {hosts[rank]}" for rank in wrong) if verdict != "ok" else ""
    remedy = "let chrony or ntpd run on every host" if verdict != "ok" else ""
    return Check("network", "clock skew", f"{apart:.3f} s", f"at most {SKEW_WARN:.0f} s", verdict, remedy, where=where)


# ---------------------------------------------------------------- bandwidths


def timed(operation: Callable[[], object], group: dist.ProcessGroup | None = None, rounds: int = ROUNDS) -> float:
    """Seconds of the fastest of several rounds, each begun together."""
    best = float("inf")
    for _ in range(rounds + 1):  # the first one opens connections
        dist.barrier(group=group)
        started = time.perf_counter()
        operation()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def all_reduce_checks(hosts: Sequence[str], megabytes: int) -> Iterator[Check]:
    """Over the ranks of each host, which all hosts do at once; and over all ranks."""
    by_host = {host: [rank for rank, name in enumerate(hosts) if name == host] for host in dict.fromkeys(hosts)}
    rank, own = dist.get_rank(), hosts[dist.get_rank()]
    if len(by_host) > 1 and any(len(ranks) > 1 for ranks in by_host.values()):
        groups = {host: dist.new_group(ranks) for host, ranks in by_host.items()}  # every rank makes every group
        if len(by_host[own]) > 1:
            found = bus_bandwidth(megabytes, len(by_host[own]), groups[own])
            if rank == by_host[own][0]:
                yield bandwidth_check("all-reduce in a host", found, expected_link(False), f"{own}")
    found = bus_bandwidth(megabytes, len(hosts), None)
    if rank == 0:
        name = "all-reduce over all hosts" if len(by_host) > 1 else "all-reduce in the host"
        per_host = max(len(ranks) for ranks in by_host.values())
        yield bandwidth_check(name, found, expected_link(len(by_host) > 1, per_host, collective=True), "")


def bus_bandwidth(megabytes: int, ranks: int, group: dist.ProcessGroup | None) -> float:
    """GB/s that each link carries."""
    buffer = torch.ones(int(megabytes * 1e6 / 4), dtype=torch.float32, device=device())
    seconds = timed(lambda: dist.all_reduce(buffer, group=group), group)
    return 2 * (ranks - 1) / ranks * buffer.numel() * 4 / seconds / GB


def pairs(world_size: int, per_host: int) -> list[tuple[int, int]]:
    """Links that are measured: neighbours, and the same place on the next host."""
    strides = dict.fromkeys(stride for stride in (1, per_host) if stride < world_size)
    return [(rank, rank + stride) for stride in strides for rank in range(world_size - stride)]


def pair_checks(hosts: Sequence[str], megabytes: int) -> Iterator[Check]:
    """One link after the other is quiet but slow for many: those that share no rank are measured at once."""
    per_host = max(hosts.count(host) for host in hosts)
    buffer = torch.ones(int(megabytes * 1e6 / 4), dtype=torch.float32, device=device())
    speeds: dict[tuple[int, int], float] = {}
    for turn in turns(pairs(len(hosts), per_host)):
        mine = next((pair for pair in turn if dist.get_rank() in pair), None)
        seconds = _exchange(buffer, mine)
        if mine is not None and dist.get_rank() == mine[0]:
            speeds[mine] = buffer.numel() * 4 / seconds / GB
    found = {pair: speed for part in gather(speeds) for pair, speed in part.items()}
    if dist.get_rank() == 0:
        yield from link_checks(found, hosts, inside=expected_link(False), across=expected_link(True))


def turns(links: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The links in as few turns as a greedy choice finds, none with a rank in two links of one turn."""
    left, made = list(links), []
    while left:
        turn: list[tuple[int, int]] = []
        busy: set[int] = set()
        for pair in left:
            if not busy & set(pair):
                turn.append(pair)
                busy |= set(pair)
        left = [pair for pair in left if pair not in turn]
        made.append(turn)
    return made


def _exchange(buffer: torch.Tensor, pair: tuple[int, int] | None) -> float:
    """Seconds from one rank to the other, and a word back, so that the sender knows of the arrival."""
    answer = torch.zeros(1, device=buffer.device)

    def there_and_back() -> None:
        if pair is None:
            return
        if dist.get_rank() == pair[0]:
            dist.send(buffer, pair[1])
            dist.recv(answer, pair[1])
        else:
            dist.recv(buffer, pair[0])
            dist.send(answer, pair[0])

    return timed(there_and_back)


def link_checks(
    speeds: dict[tuple[int, int], float], hosts: Sequence[str], *, inside: Link, across: Link
) -> Iterator[Check]:
    """Pure: the slowest link inside a host and between hosts, against what is expected and against its like."""
    for name, link in (("p2p in a host", inside), ("p2p between hosts", across)):
        kind = {pair: speed for pair, speed in speeds.items() if (hosts[pair[0]] != hosts[pair[1]]) == (link is across)}
        if not kind:
            continue
        slowest = min(kind, key=lambda pair: kind[pair])
        first, second = slowest
        where = f"rank {first} on {hosts[first]} to rank {second} on {hosts[second]}"
        check = bandwidth_check(name, kind[slowest], link, where)
        median = statistics.median(kind.values())
        if check.verdict == "ok" and kind[slowest] < 0.5 * median:
            remedy = (
                "a bad cable, port or GPU on one of the two: run doctor on these hosts alone, then drain the bad one"
            )
            yield Check("network", name, check.value, f"{median:.3g} GB/s as the others", "warn", remedy, where=where)
        else:
            yield check


def bandwidth_check(name: str, found: float, link: Link, where: str) -> Check:
    check = judged("network", name, found, "GB/s", floor=link.floor, fail=link.fail, remedy=link.remedy)
    expected = f"{check.expected} ({link.name})"
    shown = where if check.verdict != "ok" else ""
    return Check(check.subject, check.name, check.value, expected, check.verdict, check.remedy, where=shown)
