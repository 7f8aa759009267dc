"""The stage of a scenario: the real server and worker machines, a link between them, a data plane, and virtual time.

Everything is perfect unless the script says otherwise: messages arrive at once and in order, reads stop when asked, and
nothing happens between two commands. Both machines are asked for their invariants after every event.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

from tensorhub.protocol.manifest import Layout
from tensorhub.protocol.messages import Hello, Holding, Orders, Refusal, ToServer, ToWorker
from tensorhub.protocol.settings import Settings
from tensorhub.server import Outbox, Server
from tensorhub.server.journal import encoded, history_of

from .player import Player
from .words import Words, name_of

BOOT = "this boot"
MAX_STEPS = 20_000  # of one command; a conversation that does not end is a bug


@dataclass
class Letter:
    """One message on its way."""

    player: Player
    message: ToServer | ToWorker
    is_up: bool  # to the server

    def __post_init__(self) -> None:
        self.line, self.sender = self.player.line, self.player.sender

    @property
    def lane(self) -> tuple[str, bool]:
        return self.player.name, self.is_up


@dataclass
class Stage:
    """All that a script can move. Each method is one thing that happens; what follows from it is in `lines`."""

    settings: Settings = field(
        default_factory=lambda: Settings(default_retain=0, slow_s=1000.0, keep_established=False)
    )
    now: float = 0.0
    lines: list[str] = field(default_factory=list)
    players: dict[str, Player] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=dict)
    contents: dict[str, list[str]] = field(default_factory=dict)  # what was published, by root
    held: dict[tuple[str, bool], list[Letter]] = field(default_factory=dict)
    cut: dict[str, None] = field(default_factory=dict)
    server: Server | None = None
    server_lives: int = 0
    journal: bytes = b""  # outlives the server
    kept_journal: bytes = b""  # as it was once

    def __post_init__(self) -> None:
        self.words = Words()
        self._queue: deque[Letter] = deque()
        self._backlog: deque[Letter | str] = (
            deque()
        )  # what a server that stands still has not seen: a name: its line ended
        self._is_stalled = False
        self._shown_at = 0.0
        self._is_quiet = False

    def say(self, line: str | None) -> None:
        """One line of the transcript."""
        if line is None or self._is_quiet:
            return
        if self.now != self._shown_at:
            self._shown_at = self.now
            self.lines.append(f"at {self.now:g} s")
        self.lines.append(line)

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """What happens meanwhile is not shown."""
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False
            self._shown_at = self.now

    # --- the server ---------------------------------------------------------------------------------------------------

    def start_server(self, *, fresh: bool, journal: bytes | None = None) -> None:
        assert self.server is None, "the server is running"
        self.server_lives += 1
        first_number = self.server_lives * 100_000
        told = history_of(journal or b"", boot=BOOT, max_versions=256) if not fresh else None
        self.server = Server(self.settings, self.now, first_number=first_number, fresh=fresh, history=told, boot=BOOT)
        self._write_journal()
        for player in self.players.values():
            if player.name not in self.cut:
                self.connect(player)

    def _write_journal(self) -> None:
        assert self.server is not None
        records, is_whole = self.server.to_journal()
        self.journal = encoded(records) if is_whole else self.journal + encoded(records)

    def crash_server(self) -> None:
        assert self.server is not None, "the server is not running"
        self.server = None
        self._queue.clear()
        self.held = {lane: [each for each in letters if not each.is_up] for lane, letters in self.held.items()}
        for player in list(self.players.values()):
            if player.name not in self.cut:
                player.disconnected()

    # --- workers ------------------------------------------------------------------------------------------------------

    def start_worker(
        self, hello: Hello, layout: Layout, copies: int = 0, cut: str = "", *, is_verified: bool = True
    ) -> None:
        name = name_of(hello.worker)
        assert name not in self.players, f"{name} is alive"
        player = self.players[name] = Player(self, hello, layout, copies, cut, is_verified)
        self.connect(player)

    def life_of(self, name: str) -> str:
        """A name for the next life of this worker."""
        self.lives[name] = self.lives.get(name, 0) + 1
        return f"{name}#{self.lives[name]}"

    def crash_worker(self, player: Player) -> None:
        del self.players[player.name]
        self.held.pop((player.name, True), None)
        self.held.pop((player.name, False), None)
        self._queue = deque(letter for letter in self._queue if letter.player is not player)
        if self.server is not None and player.name not in self.cut:
            self._line_ended(player.sender)
        self.cut.pop(player.name, None)

    def _line_ended(self, sender: str) -> None:
        if self._is_stalled:
            self._backlog.append(sender)
        elif self.server is not None:
            self._send_all(self.server.disconnected(sender, now=self.now))

    def connect(self, player: Player) -> None:
        """The player makes a new connection and says hello on it."""
        self.words.forget(player.name)
        player.retry_at, player.line = inf, player.line + 1
        if self.server is not None:
            self.send(Letter(player, player.hello, is_up=True))
            player.connected()

    # --- the link -----------------------------------------------------------------------------------------------------

    def send(self, letter: Letter) -> None:
        if letter.player.name in self.cut:
            return
        if letter.lane in self.held:
            text = self._text(letter)
            self.say(f"{text}  [held]" if text is not None else None)
            self.held[letter.lane].append(letter)
        else:
            self._queue.append(letter)

    def hand_over(self, letter: Letter, note: str = "") -> None:
        """The message arrives."""
        if letter.player is not self.players.get(letter.player.name):
            return
        if letter.is_up and letter.line <= letter.player.ended:
            return
        if letter.is_up:
            self._to_server(letter, note)
        else:
            self._show(letter, note)
            assert isinstance(letter.message, Orders | Refusal)
            letter.player.received(letter.message)

    def lose(self, letter: Letter) -> None:
        """The message never arrives."""
        self._show(letter, "  [lost]")

    def _to_server(self, letter: Letter, note: str) -> None:
        if self.server is None:
            return
        if self._is_stalled:
            self._backlog.append(letter)
            return
        self._show(letter, note)
        message = letter.message
        assert isinstance(message, ToServer)
        self._send_all(self.server.handle(message, sender=letter.sender, now=self.now))
        self.server.check_invariants()

    def _text(self, letter: Letter) -> str | None:
        who, message = letter.player.name, letter.message
        if isinstance(message, Orders | Refusal):
            return self.words.to_worker(who, message)
        return self.words.to_server(who, message)

    def _show(self, letter: Letter, note: str) -> None:
        if note:
            self.words.is_news(letter.player.name, "report" if letter.is_up else "orders", None)
        text = self._text(letter)
        self.say(f"{text}{note}" if text is not None else None)

    def _send_all(self, outbox: Outbox) -> None:
        self._write_journal()
        senders = {player.sender: player for player in self.players.values()}
        for sender, message in outbox:
            if sender not in senders:
                continue
            player = senders[sender]
            self.send(Letter(player, message, is_up=False))
            if isinstance(message, Refusal):  # and then the connection ends: nothing that comes by it is heard
                player.ended = player.line
        for sender, message in outbox:
            if sender in senders and isinstance(message, Refusal):
                self._line_ended(sender)

    def pump(self) -> None:
        """Whatever is on its way arrives, and whatever that brings about."""
        for _ in range(MAX_STEPS):
            if not self._queue:
                self._see_one_publish()
                return
            self.hand_over(self._queue.popleft())
        raise AssertionError(f"{MAX_STEPS} messages and no end")

    def _see_one_publish(self) -> None:
        """What a replica has read, all of it, is of one publish: its roots say so, whatever anybody believes (G2)."""
        replicas: dict[str, list[Player]] = {}
        for player in self.players.values():
            replicas.setdefault(f"{player.hello.model}/{player.hello.replica}", []).append(player)
        for name, players in replicas.items():
            held = [each.worker.buffer for each in players if each.worker.call is None]
            read = [each for each in held if isinstance(each, Holding) and not each.published]
            if len(read) < players[0].hello.shards or len({each.version for each in read}) > 1:
                continue
            contents = {each.root.rpartition("/")[0] for each in read}
            assert len(contents) == 1, f"{name} has version {read[0].version} of two publishes: {sorted(contents)}"

    # --- time ---------------------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Time goes on; whoever asked to be called at some time is called."""
        until = self.now + seconds
        for _ in range(MAX_STEPS):
            at = min([self._server_time(), *self._times()])
            if at > until:
                break
            self.now = max(self.now, at, round(at, 6))
            self._tick_all()
        else:
            raise AssertionError("deadlines that do not move")
        self.now = until

    def stall(self, seconds: float) -> None:
        """The server stands still while time goes on; then it takes what has come meanwhile, in order."""
        self._is_stalled = True
        self.advance(seconds)
        self._is_stalled = False
        while self._backlog:
            waiting = self._backlog.popleft()
            if isinstance(waiting, Letter):
                self._to_server(waiting, "")
            else:
                self._line_ended(waiting)
        self.pump()

    def _server_time(self) -> float:
        return self.server.next_deadline() if self.server is not None and not self._is_stalled else inf

    def _times(self) -> list[float]:
        players = self.players.values()
        return [min(player.worker.next_deadline(), player.retry_at) for player in players]

    def _tick_all(self) -> None:
        if self.server is not None and self._server_time() <= self.now:
            self._send_all(self.server.tick(now=self.now))
            self.server.check_invariants()
        for player in list(self.players.values()):
            if player.retry_at <= self.now:
                self.connect(player)
            if player.worker.next_deadline() <= self.now:
                player.tick()
        self.pump()
