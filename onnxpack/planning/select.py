"""Choose at most `budget` kernels such that everything together takes the least predicted time.

Each unit (a product at some number of rows) runs on the cheapest chosen kernel, or on the host; each kind of family
takes the cheapest of its partitions into units. All costs are whole nanoseconds, so equal is equal on every machine.

Two starts (from nothing, adding; from the best without a budget, dropping) are improved by exchanges; then every other
choice is compared by branch and bound, as far as a fixed number of steps allows. What is left open is said:
`Choice.bound`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnxpack.planning.tiling import CANNOT

Costs = npt.NDArray[np.int64]

NEVER = 10**13
"""Of a site that is on the host although a kernel could run it: more nanoseconds than any plan takes, so that as many
sites as possible are planned before any time is saved."""
STEPS = 2000
"""Nodes of the search tree that are looked at, or fewer where each is large: a fixed amount of work."""
_WORK = 40_000_000


@dataclass(frozen=True)
class Problem:
    """What is to be chosen from."""

    on_kernel: Costs
    """[units, kernels]; CANNOT where a kernel cannot run a unit."""
    on_host: Costs
    """[units]; NEVER times its sites where the host is not to be preferred to any kernel."""
    options: Sequence[Sequence[Sequence[int]]]
    """Per kind of family, per partition, its units; a unit may stand there several times."""
    weights: Sequence[int]
    """Families of each kind."""
    price: int
    """Of one more kernel."""
    budget: int


@dataclass(frozen=True)
class Choice:
    """The kernels chosen, what everything costs with them, and the least that it can cost."""

    kernels: tuple[int, ...]
    cost: int
    bound: int

    @property
    def gap_percent(self) -> float:
        """How far the choice may be from the best one; 0 when it is the best."""
        return round(100 * (self.cost - self.bound) / self.bound, 3) if self.bound else 0.0


def choose(problem: Problem, steps: int = STEPS) -> Choice:
    """The best choice that is found. The same problem gives the same choice."""
    return _Search(problem).run(steps)


class Tally:
    """Adds units up: the cheapest partition of each kind, times its families."""

    def __init__(self, options: Sequence[Sequence[Sequence[int]]], weights: Sequence[int]) -> None:
        flat = [units for partitions in options for units in partitions]
        self._units = np.array([unit for units in flat for unit in units], np.int64)
        self._options = _starts([len(units) for units in flat])
        self._kinds = _starts([len(partitions) for partitions in options])
        self._weights = np.array(weights, np.int64)

    def total(self, units: Costs) -> Costs:
        """[units, ...] to the cost of everything [...]."""
        if not len(self._weights):
            return np.zeros(units.shape[1:], np.int64)
        kinds = np.minimum.reduceat(self._sums(units), self._kinds, axis=0)
        made: Costs = np.tensordot(self._weights, kinds, axes=1)
        return made

    def best(self, units: Costs) -> list[int]:
        """[units] to the position of the cheapest partition of each kind."""
        sums = np.split(self._sums(units), self._kinds[1:]) if len(self._weights) else []
        return [int(np.argmin(part)) for part in sums]

    def _sums(self, units: Costs) -> Costs:
        made: Costs = np.add.reduceat(units[self._units], self._options, axis=0)
        return made


def _starts(counts: Sequence[int]) -> npt.NDArray[np.intp]:
    return np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.intp) if counts else np.zeros(0, np.intp)


class _Search:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tally = Tally(problem.options, problem.weights)
        self.names = _undominated(problem.on_kernel)
        """Columns of the problem that are worth a look; all indices below are positions in this list."""
        self.costs = problem.on_kernel[:, self.names]
        self.best: tuple[int, ...] = ()
        self.least = int(self.tally.total(problem.on_host))
        self.steps = 0

    def run(self, steps: int) -> Choice:
        bound = self.least
        if self.problem.budget > 0 and len(self.names):
            everything = np.minimum(self.problem.on_host, self.costs.min(axis=1))
            bound = min(bound, int(self.tally.total(everything)) + self.problem.price)
            self._improve(())
            self._improve(self._dropped(self._wanted(everything)))
            if bound < self.least:
                self._sort()
                self.steps = min(steps, 1 + _WORK // (self.costs.size + 1))
                self._branch(self.problem.on_host, (), 0)
                if self.steps > 0:
                    bound = self.least
        return Choice(tuple(sorted(int(self.names[j]) for j in self.best)), self.least, bound)

    # --- two starts and exchanges ---

    def _wanted(self, everything: Costs) -> tuple[int, ...]:
        """The kernels that would be used if there were no budget and no price."""
        partitions = self.tally.best(everything)
        used = {unit for kind, i in zip(self.problem.options, partitions, strict=True) for unit in kind[i]}
        cheapest = self.costs.argmin(axis=1)
        return tuple(sorted({int(cheapest[u]) for u in used if self.costs[u, cheapest[u]] == everything[u]}))

    def _dropped(self, kernels: tuple[int, ...]) -> tuple[int, ...]:
        """Fewer kernels, always without the one that is missed least, until they are within the budget."""
        while (surplus := len(kernels) - self.problem.budget) > 0:
            costs = self.costs[:, kernels]
            first = costs.argmin(axis=1)
            least, second = np.sort(np.concatenate([costs, np.full((len(costs), 1), CANNOT)], axis=1), axis=1)[:, :2].T
            without = np.where(first[:, None] == np.arange(len(kernels)), second[:, None], least[:, None])
            missed = self.tally.total(np.minimum(self.problem.on_host[:, None], without))
            order = np.argsort(missed, kind="stable")[max(1, surplus // 4) :]
            kernels = tuple(kernels[i] for i in sorted(order))
        return kernels

    def _improve(self, kernels: tuple[int, ...]) -> None:
        """Add, exchange or drop one kernel at a time, always the first of what helps most, until nothing helps."""
        cost = self._cost(kernels)
        while True:
            tried = [(cost, kernels)]
            for kept in [kernels, *_without_one(kernels)]:
                tried.append((self._cost(kept), kept))
                if len(kept) < self.problem.budget:
                    with_one = self._with_one_more(self._units(kept))
                    j = int(np.argmin(with_one))
                    tried.append((int(with_one[j]) + (len(kept) + 1) * self.problem.price, (*kept, j)))
            least, best = min(tried, key=lambda t: t[0])
            if least >= cost:
                break
            cost, kernels = least, best
        if cost < self.least:
            self.best, self.least = kernels, cost

    def _cost(self, kernels: tuple[int, ...]) -> int:
        return int(self.tally.total(self._units(kernels))) + len(kernels) * self.problem.price

    def _units(self, kernels: tuple[int, ...]) -> Costs:
        units = self.problem.on_host
        for j in kernels:
            units = np.minimum(units, self.costs[:, j])
        return units

    def _with_one_more(self, units: Costs, start: int = 0) -> Costs:
        """Cost of all units with each single kernel from `start` on added, without prices."""
        return self.tally.total(np.minimum(units[:, None], self.costs[:, start:]))

    # --- branch and bound ---

    def _sort(self) -> None:
        """The kernels of the best choice first, then by what each costs alone: good ones early make good bounds."""
        alone = self._with_one_more(self.problem.on_host)
        order = sorted(range(len(self.names)), key=lambda j: (j not in self.best, int(alone[j]), j))
        self.best = tuple(order.index(j) for j in self.best)
        self.names = self.names[order]
        self.costs = self.costs[:, order]
        reverse = np.minimum.accumulate(self.costs[:, ::-1], axis=1)[:, ::-1]
        self.later = np.concatenate([reverse[:, 1:], np.full((len(reverse), 1), CANNOT)], axis=1)
        """[units, kernels]: the least that any kernel behind this one makes of a unit."""

    def _branch(self, units: Costs, chosen: tuple[int, ...], start: int) -> None:
        """Look at every way to go on with kernels from `start` on."""
        self.steps -= 1
        if self.steps <= 0 or start >= len(self.names):
            return
        price = self.problem.price
        with_one = self._with_one_more(units, start) + (len(chosen) + 1) * price
        j = int(np.argmin(with_one))
        if with_one[j] < self.least:
            self.best, self.least = (*chosen, start + j), int(with_one[j])
        if len(chosen) + 1 >= self.problem.budget:
            return
        reachable = np.minimum(np.minimum(units[:, None], self.costs[:, start:]), self.later[:, start:])
        bounds = self.tally.total(reachable) + (len(chosen) + 2) * price
        for i in range(len(bounds)):
            if self.steps <= 0:
                return
            if bounds[i] < self.least:
                j = start + i
                self._branch(np.minimum(units, self.costs[:, j]), (*chosen, j), j + 1)


def _without_one(kernels: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [kernels[:i] + kernels[i + 1 :] for i in range(len(kernels))]


def _undominated(costs: Costs) -> npt.NDArray[np.intp]:
    """Columns that no other column equals or beats everywhere; of equal ones the first."""
    count = costs.shape[1]
    keep = np.ones(count, bool)
    order = np.argsort(
        np.minimum(costs, NEVER).sum(axis=0), kind="stable"
    )  # whatever beats j stands before it, or ties
    for position, j in enumerate(order):  # whatever beats a column stands before it
        if keep[j]:
            behind = order[position + 1 :]
            behind = behind[keep[behind]]
            keep[behind[(costs[:, behind] >= costs[:, [j]]).all(axis=0)]] = False
    return np.flatnonzero(keep)
