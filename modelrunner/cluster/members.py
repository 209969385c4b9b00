"""The members of a Ray cluster as hosts. Ray is asked by a process of its own (`raymembers.py`): a cluster that does
not answer, and Ray's threads, do not touch the daemon."""

import asyncio
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NoReturn

import msgspec

from modelrunner.cluster.messages import HostAddress
from modelrunner.cluster.remotehost import RemoteHost
from modelrunner.cluster.reservations import Order, RayLimits, Reservations
from modelrunner.cluster.transfers import SendTurns
from modelrunner.errors import BadRequest, ModelRunnerError, NotFound
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.scheduler import Scheduler, Target
from modelrunner.store import Store
from modelrunner.wire import HostStatus, Memory

log = logging.getLogger(__name__)
_AGAIN = 1.0, 30.0  # seconds until a lost cluster is asked again, at first and at most
_LONGEST_LINE = 1 << 20
_SHOWN = 3600.0  # seconds for which a host that is gone is still listed


class ClusterMember(msgspec.Struct, frozen=True):
    """A line of `raymembers.py`: a node that has come (`address` and so on, with so many `cards` in Ray), has gone, has
    other `limits`, or cannot be used (`problem`); the answer to the order of the name `taken`, with the ID of the
    `group` of its bundles; or a line about the cluster."""

    node: str = ""
    name: str = ""
    address: str = ""
    port: int = 0
    certificate: str = ""
    cards: int = 0
    labels: tuple[str, ...] = ()
    limits: RayLimits | None = None
    taken: str = ""
    group: str = ""
    gone: bool = False
    problem: str = ""


class Members:
    """Keeps the scheduler's hosts as the cluster has them. `address` is Ray's; nodes must have the `label`
    (`NAME=VALUE`), "" for all; `shared` ones see the store at the same path. `hosts` are those that are there or
    were, by name; `problem` says why the cluster cannot be used, "" if it can."""

    def __init__(
        self,
        scheduler: Scheduler,
        registry: BackendRegistry,
        store: Store,
        address: str,
        label: str = "",
        *,
        shared: bool = False,
    ) -> None:
        self._scheduler, self._registry, self._store = scheduler, registry, store
        self._address, self._label, self._shared = address, label, shared
        self._key = secrets.token_hex(16)
        self.hosts: dict[str, RemoteHost] = {}
        self._turns = SendTurns(self.hosts.values)
        self._reservations: dict[str, Reservations] = {}  # by the node's ID
        self._problems: dict[str, str] = {}
        self._orders: asyncio.StreamWriter | None = None
        self.problem = f"the Ray cluster at {address} was not reached yet"
        self._began = time.monotonic()
        scheduler.expect_hosts(self.moved)

    async def run(self) -> None:
        """Follows the cluster until it is cancelled. The nodes are left by then."""
        try:
            await self._follow_on()
        finally:  # also those that came while the scheduler closed its hosts
            await asyncio.gather(*[host.close() for host in self.hosts.values()])

    async def _follow_on(self) -> NoReturn:
        first, most = _AGAIN
        pause = first
        while True:
            try:
                await self._follow()
            except OSError as error:  # no process can be made, or no file opened
                self.problem = f"Ray cannot be asked: {error}"
            pause = min(2 * pause, most) if self.problem else first
            for host in self.hosts.values():
                host.leave()
            for held in self._reservations.values():
                held.end()
            self._reservations.clear()
            self.problem = self.problem or "Ray is lost, or the program that asks it has ended: it is started again"
            log.warning("the cluster: %s", self.problem)
            await asyncio.sleep(pause)

    async def _follow(self) -> None:
        """Returns when the process has ended."""
        command = [sys.executable, "-m", "modelrunner.cluster.raymembers", self._address, self._label]
        environment = os.environ | {"MODELRUNNER_HOST_KEY": self._key, "RAY_USAGE_STATS_ENABLED": "0"}
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=-1,
            stdout=-1,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
            limit=_LONGEST_LINE,
            start_new_session=True,  # Ctrl-C is for the daemon, which lets answers end before it ends this one
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._orders = process.stdin
        try:
            while line := await process.stdout.readline():
                with suppress(msgspec.MsgspecError):  # another program's words
                    self._learn(msgspec.json.decode(line, type=ClusterMember))
        except ValueError:
            self.problem = "its process says too much"
        finally:
            self._orders = None
            process.stdin.close()
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()

    def _order(self, order: Order) -> None:
        if self._orders is not None:  # without the process Ray has given all of it back
            self._orders.write(msgspec.json.encode(order) + b"\n")

    def _learn(self, member: ClusterMember) -> None:
        reservations = self._reservations.get(member.node or member.taken.partition(" ")[0])
        if member.taken:
            if reservations is not None:
                reservations.answered(member.taken, member.problem, member.group)
        elif member.limits is not None:
            if reservations is not None:
                reservations.limits = member.limits
                self._scheduler.hosts_changed()
        elif not member.node:
            if member.problem and member.problem != self.problem:
                log.warning("the cluster: %s", member.problem)
            self.problem = member.problem
        elif member.gone:
            self._problems.pop(member.name, None)
            ours = self._reservations.pop(member.node, None)
            if (host := self.hosts.get(member.name)) is not None and host.reservations is ours:
                host.leave()
        elif member.problem:
            self._problems[member.name] = member.problem
            log.warning("the host %s cannot be used: %s", member.name, member.problem)
        else:
            where = HostAddress(member.address, member.port, self._key, member.certificate)
            reservations = Reservations(member.node, member.cards, self._order)
            changed: Callable[[], None] = self._scheduler.hosts_changed
            try:
                host = RemoteHost(
                    member.name,
                    where,
                    self._registry,
                    self._store,
                    changed,
                    reservations,
                    member.labels,
                    turns=self._turns,
                    is_busy=self._scheduler.awaited,
                    shared=self._shared,
                )
            except (OSError, ValueError) as error:
                self._problems[member.name] = f"its certificate cannot be read: {error}"
                return
            self._problems.pop(member.name, None)
            if (former := self.hosts.get(member.name)) is not None:
                if former.is_usable:
                    log.warning("two nodes are named %s: the one at %s is used", member.name, member.address)
                former.leave()
                host.is_draining = former.is_draining
            self._reservations[member.node] = reservations
            self.hosts[member.name] = host
            self._scheduler.add_host(host)
            self._forget()
            log.info("the host %s at %s has joined", member.name, member.address)

    def _forget(self) -> None:
        """Drops the hosts that went long ago, which grow in number where a node has a new name each time. One that was
        drained stays: it is not to be used when it comes again."""
        before = time.monotonic() - _SHOWN
        for name, host in list(self.hosts.items()):
            in_use = host.runners or host.parts or host.is_draining
            if host.state == "gone" and host.moved < before and not in_use:
                del self.hosts[name]
                self._scheduler.remove_host(name)

    def moved(self) -> float:
        """Returns the time of the monotonic clock when a host last came or was lost, the daemon's start at first."""
        return max([self._began, *[host.moved for host in self.hosts.values()]])

    def view(self) -> list[HostStatus]:
        """Returns the hosts, sorted by name."""
        views = []
        for name, host in self.hosts.items():
            report, budget, models, devices = host.report, None, 0, list[str]()
            if report is not None:
                within = host.within(report.budget)
                budget, models = Memory(within.ram, list(within.vram)), len(report.models | report.seen)
                devices = [device.name for device in report.devices]
            where = host.where.address
            views.append(
                HostStatus(name, host.state, where, budget, devices, models, len(host.runners) + len(host.parts))
            )
        for name, problem in self._problems.items():
            if name not in self.hosts:
                views.append(HostStatus(name, problem, "", None, [], 0, 0))
        return sorted(views, key=lambda host: host.name)

    async def preload(self, target: Target, names: Collection[str]) -> dict[str, str]:
        """Brings a model and its engine to the hosts of these names, to all for none. Returns for each of them "", or
        why it has not got them. Raises `NotFound` for a name."""
        for name in names:
            self._host(name)
        wanted = [host for name, host in self.hosts.items() if not names or name in names]

        async def bring(host: RemoteHost) -> str:
            try:
                if not host.is_usable:
                    return f"it is {host.state}"
                await host.fetch(target.spec)
                await host.install(target.key.backend, lambda stage: None)
            except ModelRunnerError as error:
                return str(error)
            return ""

        return dict(zip([host.name for host in wanted], await asyncio.gather(*map(bring, wanted)), strict=True))

    def _host(self, name: str) -> RemoteHost:
        if (host := self.hosts.get(name)) is None:
            raise NotFound(f"there is no host {name!r}: `modelrunner hosts list` shows them", param="host")
        return host

    async def drain(self, name: str, *, on: bool) -> None:
        """Starts no more runners on the host, and ends its idle ones; with `on` False uses it again. Raises
        `NotFound`."""
        host = self._host(name)
        if host.report is None:
            raise BadRequest(f"the host {name} does not answer", param="host")
        host.is_draining = on
        self._scheduler.hosts_changed()
        if on:
            await self._scheduler.unload(host=name)
