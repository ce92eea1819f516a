"""Ranks at different batches agree on one before which all of them talk."""

from __future__ import annotations

import random
from collections import defaultdict
from functools import partial
from typing import Any

from lightning_hybrid.failures.meeting import Meeting, Meetings


class Run:
    """Ranks on their way through 40 batches; messages of a connection come in order, else anything in any order."""

    def __init__(self, num_ranks: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.lines: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        self.hub = Meetings(num_ranks, self.tell)
        self.ranks = [Meeting(partial(self.send, number)) for number in range(num_ranks)]
        self.states, self.batches = ["runs"] * num_ranks, [1] * num_ranks
        self.talks: list[int] = []
        self.asks = {self.draw.randrange(num_ranks): self.draw.randrange(2, 30) for _ in range(2)}

    def tell(self, **message: Any) -> None:
        for number in range(len(self.ranks)):
            self.lines["to", number].append(message)

    def send(self, number: int, **message: Any) -> None:
        self.lines["from", number].append(message)

    def deliver(self) -> None:
        way, number = self.draw.choice([line for line, messages in self.lines.items() if messages])
        message = self.lines[way, number].pop(0)
        if way == "to":
            self.ranks[number].hear(message)
        elif message["kind"] == "meet?":
            self.hub.ask(len(self.ranks))
        else:
            self.hub.note(number, message["batch"])

    def go_on(self, number: int) -> None:
        """To the next batch; a talk takes until all have come."""
        rank, batch = self.ranks[number], self.batches[number]
        if rank.is_held or self.states[number] == "talks" or batch > 40:
            return
        if self.states[number] == "has talked":
            rank.talked()
        else:
            if self.asks.get(number, 99) <= batch:
                rank.ask()
            if batch % 16 == 0 or rank.is_due():  # before some batches all talk in any case
                self.states[number] = "talks"
                if self.states == ["talks"] * len(self.ranks):
                    assert len(set(self.batches)) == 1
                    self.talks.append(batch)
                    self.states = ["has talked"] * len(self.ranks)
                    self.asks.clear()
                return
        self.states[number] = "runs"
        self.batches[number] += 1

    def run(self) -> list[int]:
        """Return the batches before which all have talked."""
        for _ in range(20_000):
            if any(self.lines.values()) and self.draw.random() < 0.5:
                self.deliver()
            else:
                self.go_on(self.draw.randrange(len(self.ranks)))
            if min(self.batches) > 40:
                return self.talks
        raise AssertionError(f"Ranks wait for each other at {self.batches}: {self.states}")


def test_all_ranks_talk_before_the_same_batches() -> None:
    found = [Run(3, seed).run() for seed in range(100)]
    assert all({16, 32} <= {*talks} for talks in found)
    assert sum(len(talks) > 2 for talks in found) > 20


def test_who_waits_goes_on_when_a_rank_is_gone() -> None:
    told: list[dict[str, Any]] = []
    hub, rank = Meetings(2, lambda **message: told.append(message)), Meeting(lambda **message: None)
    hub.ask(1)
    assert told == []  # not all can be asked
    hub.ask(2)
    rank.hear(told.pop())
    hub.cancel()
    rank.hear(told.pop())
    assert not rank.is_due()
    rank.hear({"kind": "hold"})
    rank.end()
    assert not rank.is_due()
