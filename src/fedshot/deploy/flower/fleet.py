"""The fleet whose clients live on Flower's nodes.

One letter takes a node all that an exchange asks of its clients. It also takes the orders that have
come up since the last one (drop the states that were not accepted, void a round), which therefore
cost no message of their own. Only a seal does, and only where a method keeps private states.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from fedshot.deploy.flower.codec import LIMITS, CodecError, Limits
from fedshot.deploy.flower.letters import COMMON, Letter, Mail
from fedshot.deploy.flower.roster import HELLO, NO_SEAL, Carrier, Node, Roster, Seal
from fedshot.deploy.flower.setup import Setup
from fedshot.errors import CheckpointError
from fedshot.fleets.wrapper import Wrapper
from fedshot.protocol import Arrival, Exchange, Fault, Fleet, PerClient, Reply


class FlowerFleet(Wrapper):
    """Clients on nodes.

    Args:
        here: the fleet of the server's own machine, for work that asks no client.
        post: carries the letters.
        setup: what nodes are told of the run.
        life: number of this life of the run, above all that were before.
        keeps: whether the method's clients have private states.
        deadline: seconds that an exchange waits for replies.
        limits: the most that is taken in.
        tell: where it is said what was dropped.
    """

    def __init__(
        self,
        here: Fleet,
        post: Carrier,
        setup: Setup,
        *,
        life: int,
        keeps: bool,
        deadline: float,
        limits: Limits = LIMITS,
        tell: Callable[[str], None] = print,
    ) -> None:
        super().__init__(here)
        self.roster = Roster(post, setup, life, tell)
        self._post, self._keeps, self._deadline = post, keeps, deadline
        self._limits, self._tell = limits, tell
        self._opened: dict[int, dict[str, Seal]] = {}
        self._rounds: dict[int, dict[str, int]] = {}  # that a node's states of a seal are of
        self.seconds = 0.0  # that nodes say they worked, of the slowest of each exchange

    def missing(self, clients: Collection[int]) -> list[int]:
        """Return the clients whose node is not there."""
        there = self.roster.there().values()
        return sorted(set(clients).difference(*(node.clients for node in there)))

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the arrivals of the clients, as their nodes answer."""
        there, homes = self.roster.there(), self.roster.homes()
        asked: dict[int, list[int]] = defaultdict(list)
        for client in exchange.to:
            node = homes.get(client)
            if node is None:
                yield Arrival(client, None, Fault("lost", "no node holds this client"))
            elif node.number not in there:
                reason = f"node {node.name} is not connected"
                yield Arrival(client, None, Fault("lost", reason))
            else:
                asked[node.number].append(client)
        common = Letter({})
        if not isinstance(exchange.down, PerClient):
            common.put(COMMON, exchange.down)  # once, however many nodes it goes to
        letters = {
            number: self._work(exchange, there[number], to, common) for number, to in asked.items()
        }
        slowest = 0.0
        for mail in self._post.ask(letters, self._deadline):
            slowest = max(slowest, self.roster.note(mail))
            yield from self._arrivals(mail, there[mail.node].name, asked[mail.node])
        self.seconds += slowest

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        """Let the nodes drop the states of clients that were not accepted."""
        if exchange.phase != "train" or not self._keeps:
            return
        for node in self.roster:
            dropped = sorted((node.clients & set(exchange.to)) - accepted)
            if dropped:
                self.roster.order(node, "drop", list(exchange.version), dropped)

    def void(self, round: int) -> None:
        """Let the nodes drop the states of a round that does not count, and the bank here."""
        self.bank.void(round)
        for node in self.roster if self._keeps else ():
            self.roster.order(node, "void", round)

    def seal(self, round: int, keep: Collection[int]) -> str:
        """Make this round's states last on every node that answers, and the bank here.

        Returns who sealed what.

        Of a node that does not answer an earlier seal stands. Should the run be gone on with from
        this checkpoint, its clients go back to that.
        """
        bank = self.bank.seal(round, keep)
        if not self._keeps:
            return json.dumps({"bank": bank}) if bank else ""
        self._rounds = {r: found for r, found in self._rounds.items() if r in keep}
        for node in self.roster:
            kept = {self._rounds.get(r, {}).get(node.name, r) for r in keep}
            self.roster.order(node, "seal", round, sorted(kept | {node.base[0]}))
        for mail, name in self._tell_all(self._deadline):
            if mail.reason:
                self._tell(f"node {name} has not sealed round {round}: {mail.reason}")
        self.roster.bases |= {node.name: node.base for node in self.roster}
        bases = dict(sorted(self.roster.bases.items()))
        found = {"nodes": bases, "kept": self._rounds} | ({"bank": bank} if bank else {})
        text = json.dumps(found, sort_keys=True)
        self._rounds[round] = {name: r for name, (r, _) in bases.items()}
        return text

    def open(self, round: int, sha: str) -> None:
        """Remember which states belong to a sealed round."""
        self.bank.open(round, _bank(sha))
        self._opened[round] = _bases(sha)
        self._rounds[round] = {name: r for name, (r, _) in self._opened[round].items()}
        for kept, rounds in json.loads(sha or "{}").get("kept", {}).items():
            self._rounds.setdefault(int(kept), rounds)

    def rewind(self, round: int, sha: str) -> None:
        """Begin this life of the run with the states of a sealed round.

        Raises CheckpointError when a node that is there does not have them.
        """
        self.bank.rewind(round, _bank(sha))
        self.roster.begin_life(_bases(sha))
        for mail, name in self._tell_all(max(HELLO, self._deadline)):
            if mail.reason and mail.letter is not None:
                raise CheckpointError(f"node {name} cannot go back to round {round}: {mail.reason}")

    def _tell_all(self, seconds: float) -> Iterator[tuple[Mail, str]]:
        """Send every node that is there its orders; yield what it says, with its name."""
        there = self.roster.there()
        letters = {number: self.roster.letter(node) for number, node in there.items()}
        for mail in self._post.ask(letters, seconds):
            self.roster.note(mail)
            yield mail, there[mail.node].name

    def _work(self, exchange: Exchange, node: Node, to: Sequence[int], common: Letter) -> Letter:
        letter = self.roster.letter(node)
        letter.add(common)
        for client in to:
            message = exchange.message(client)  # counted for each client
            if COMMON not in letter.blocks:
                letter.put(f"c{client}", message)
        letter.head["work"] = {
            "name": exchange.work.name,
            "phase": exchange.phase,
            "version": list(exchange.version),
            "as_of": self._as_of(exchange, node),
            "key": [exchange.key.root, *exchange.key.path],
            "clients": list(to),
        }
        return letter

    def _as_of(self, exchange: Exchange, node: Node) -> list[Any] | None:
        """Return the seal that an evaluation of an earlier round looks at."""
        opened = self._opened.get(exchange.version[0])
        if exchange.phase == "train" or opened is None or not self._keeps:
            return None
        return list(opened.get(node.name, NO_SEAL))

    def _arrivals(self, mail: Mail, name: str, asked: Sequence[int]) -> Iterator[Arrival]:
        if mail.letter is None or mail.reason:
            for client in asked:
                yield Arrival(client, None, Fault("lost", f"node {name}: {mail.reason}"))
            return
        results = mail.letter.head.get("results")
        results = results if isinstance(results, dict) else {}
        for stranger in sorted(set(results) - set(map(str, asked))):
            self._tell(f"node {name} answers for {stranger[:20]!r}, which was not asked; dropped")
        for client in asked:
            if str(client) not in results:
                yield Arrival(client, None, Fault("lost", f"node {name} says nothing of it"))
                continue
            try:
                yield _arrival(client, results[str(client)], mail.letter, self._limits)
            except CodecError as error:
                yield Arrival(client, None, Fault("refused", f"node {name}: {error}"))


def _arrival(client: int, result: Any, letter: Letter, limits: Limits) -> Arrival:
    if not isinstance(result, dict):
        raise CodecError("its result has no names")
    if "fault" in result:
        kind, reason = (str(word)[:500] for word in [*result["fault"], "", ""][:2])
        return Arrival(client, None, Fault("refused" if kind == "refused" else "lost", reason))
    content = letter.get(f"c{client}", limits)
    if not isinstance(content, dict) or not {"up", "metrics"} <= set(content):
        raise CodecError("its reply has no parts")
    weight: Any = content["weight"] if "weight" in content else result.get("weight")
    return Arrival(client, Reply(content["up"], {}, weight, content["metrics"]))


def _bank(sha: str) -> str:
    found: str = json.loads(sha or "{}").get("bank", "")
    return found


def _bases(sha: str) -> dict[str, Seal]:
    nodes = json.loads(sha or "{}").get("nodes", {})
    return {name: (round, found) for name, (round, found) in nodes.items()}
