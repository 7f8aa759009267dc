"""Runs a scenario: a text file of commands, each followed by what everybody said and did, indented.

Lines that begin in the first column are the script: commands, and `#` comments. Indented lines are the transcript; they
are rewritten by `make bless`. README.md in this folder lists the commands.
"""

import re
import textwrap
from collections.abc import Callable
from math import prod

from tensorhub.protocol.events import ReadMoved
from tensorhub.protocol.manifest import Layout, TensorSpec, contiguous_strides, item_bytes
from tensorhub.protocol.messages import PROTOCOL, Failure, Hello
from tensorhub.protocol.names import Digest, ModelName, ReplicaName, Shard, Version
from tensorhub.protocol.settings import Settings
from tensorhub.worker.events import ReadMeasured

from .player import CHUNKS, Player
from .stage import Letter, Stage
from .states import content_of, state_of

WIDTH = 112
INDENT = "    "
USUAL_TIMEOUT_S = 60.0
TENSORS = "w:float32[4]"


class ScriptError(Exception):
    """The script itself is wrong; the message names the line."""


def run_script(text: str) -> str:
    """The script with the transcript of what happens now under each command."""
    stage = Stage()
    written: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith(INDENT):
            continue
        written.append(line)
        if not line or line.startswith("#"):
            continue
        try:
            run_line(stage, line)
            stage.pump()
        except (AssertionError, ValueError, KeyError, IndexError) as error:
            raise ScriptError(f"line {number}: {line!r}: {error}") from error
        for said in stage.lines:
            written += textwrap.wrap(said, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT * 2)
        stage.lines.clear()
    return "\n".join(written) + "\n"


def run_line(stage: Stage, line: str) -> None:
    words = line.split()
    if words[0] == "quietly":
        with stage.quietly():
            run_line(stage, line.removeprefix("quietly").strip())
            stage.pump()
        return
    if words[0] not in COMMANDS:
        raise ValueError(f"no command {words[0]!r}; there are {', '.join(COMMANDS)}")
    COMMANDS[words[0]](stage, words[1:])


def _seconds(word: str) -> float:
    found = re.fullmatch(r"([0-9.]+)s", word)
    if found is None:
        raise ValueError(f"{word!r} is no time; write 2s or 0.5s")
    return float(found[1])


def _options(words: list[str], known: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """Plain words, then `key value` pairs."""
    plain, options = list(words), {}
    for key in known:
        if key in plain:
            at = plain.index(key)
            options[key] = plain[at + 1]
            del plain[at : at + 2]
    return plain, options


def _players(stage: Stage, name: str) -> list[Player]:
    """`rollout/0`: that one; `rollout`: each shard of that replica."""
    found = [p for p in stage.players.values() if name in (p.name, p.name.rpartition("/")[0])]
    if not found:
        raise ValueError(f"nobody is called {name}")
    return found


def _player(stage: Stage, name: str) -> Player:
    (found,) = _players(stage, name)
    return found


# --- the cast ---------------------------------------------------------------------------------------------------------


def _settings(stage: Stage, words: list[str]) -> None:
    names = ("lease", "report", "failures", "retain", "slow", "established")
    _, options = _options(words, (*names, "versions"))
    lease_s = _seconds(options.get("lease", "10s"))
    report_s = _seconds(options.get("report", "1s"))
    failures, retain = int(options.get("failures", "8")), int(options.get("retain", "0"))
    times = {"lease_s": lease_s, "report_s": report_s, "slow_s": _seconds(options.get("slow", "1000s"))}
    keep = options.get("established", "no") == "kept"
    stage.settings = Settings(
        **times,
        max_failures=failures,
        default_retain=retain,
        keep_established=keep,
        max_versions=int(options.get("versions", "256")),
    )


def _server(stage: Stage, words: list[str]) -> None:
    journal = stage.kept_journal if "kept" in words else b"" if "forgetful" in words else stage.journal
    stage.start_server(fresh="restarted" not in words, journal=journal)


def _keep(stage: Stage, words: list[str]) -> None:
    assert words == ["journal"], "only the journal can be kept"
    stage.kept_journal = stage.journal


def _worker(stage: Stage, words: list[str]) -> None:
    tensors = TENSORS
    if "with" in words:
        at = words.index("with")
        words, tensors = words[:at], " ".join(words[at + 1 :])
    plain = [word for word in words if word not in ("revocable", "spot", "unverified")]
    (name,), options = _options(plain, ("of", "cut", "host", "copies", "site", "prefetch", "place"))
    replica, _, shard = name.partition("/")
    shards = int(options.get("of", "1"))
    for number in [int(shard)] if shard else range(shards):
        player_name = f"{name.rpartition('/')[0] or name}/{number}"
        life = stage.life_of(player_name)
        stage.start_worker(
            Hello(
                PROTOCOL,
                ModelName("policy"),
                ReplicaName(replica),
                Shard(number),
                shards,
                life,
                endpoints=(f"link://{life}",),
                revocable="revocable" in words,
                reliable="spot" not in words,
                site=options.get("site", ""),
                host=options.get("host", life),
                prefetch=options.get("prefetch", "never"),
                place=options.get("place", ""),
            ),
            _layout(tensors),
            int(options.get("copies", "0")),
            options.get("cut", ""),
            is_verified="unverified" not in words,
        )
        stage.pump()


def _layout(text: str) -> Layout:
    found = re.findall(r"(\w+):(\w+)\[([\d,]*)\]", text)
    if not found:
        raise ValueError(f"{text!r} is no tensors; write w:float32[4] b:int64[2,3]")
    tensors, at = list[TensorSpec](), 0
    for name, dtype, sizes in found:
        shape = tuple(int(size) for size in sizes.split(",") if size)
        size_bytes = prod(shape) * item_bytes(dtype)
        tensors.append(TensorSpec(name, dtype, shape, contiguous_strides(shape), at, size_bytes))
        at += size_bytes
    return Layout(tuple(tensors), at)


def _crash(stage: Stage, words: list[str]) -> None:
    if words == ["server"]:
        stage.crash_server()
        return
    for player in _players(stage, words[0]):
        stage.crash_worker(player)


# --- calls ------------------------------------------------------------------------------------------------------------


def _call(stage: Stage, words: list[str]) -> None:
    plain, options = _options(words, ("as", "within", "saying", "tiles"))
    name, verb, *rest = plain
    spec: int | str = rest[0] if rest else ""
    spec = int(spec) if isinstance(spec, str) and spec.isdigit() else spec
    timeout_s = _seconds(options["within"]) if "within" in options else USUAL_TIMEOUT_S
    grid = Digest(options.get("tiles", ""))
    for player in _players(stage, name):
        content, said = options.get("as", f"v{spec}"), Digest(options.get("saying", ""))
        player.call(
            verb,
            spec,
            timeout_s,
            content,
            waits="waiting" in rest[1:],
            metadata=said,
            grid=grid,
            untiled="untiled" in rest[1:],
        )
        stage.pump()


def _miss(stage: Stage, words: list[str]) -> None:
    call, why = " ".join(words[1:]).split(": ", 1)
    verb, _, spec = call.partition(" ")
    _player(stage, words[0]).miss(verb, int(spec) if spec.isdigit() else spec, why)


def _cancel(stage: Stage, words: list[str]) -> None:
    _player(stage, words[0]).cancel()


def _close(stage: Stage, words: list[str]) -> None:
    plain, options = _options(words, ("within",))
    for player in _players(stage, plain[0]):
        player.close(_seconds(options.get("within", "60s")))
        stage.pump()


def _register(stage: Stage, words: list[str]) -> None:
    at = words.index("with") if "with" in words else len(words)
    plain, options = _options(words[:at], ("copies", "cut"))
    for player in _players(stage, plain[0]):
        player.cut = options.get("cut", player.cut)
        player.register(_layout(" ".join(words[at + 1 :]) or TENSORS), int(options.get("copies", "0")))
        stage.pump()


# --- bytes ------------------------------------------------------------------------------------------------------------


def _read(stage: Stage, words: list[str]) -> None:
    for player in _players(stage, words[0]):
        chunks = CHUNKS if words[1:] in ([], ["all"]) else int(words[1])
        for _ in range(chunks):
            if not player.read_chunk():
                break
            stage.pump()
        stage.pump()


def _corrupt(stage: Stage, words: list[str]) -> None:
    _player(stage, words[0]).read_chunk(corrupt=True)


def _fail(stage: Stage, words: list[str]) -> None:
    player = _player(stage, words[0])
    source = words.pop(1) if "/" in words[1] else ""
    player.read_fails(words[1], " ".join(words[2:]) or "connection reset", source)


def _misfit(stage: Stage, words: list[str]) -> None:
    for player in _players(stage, words[0]):
        player.is_misfit = True


def _cannot_map(stage: Stage, words: list[str]) -> None:
    _player(stage, words[0]).cannot_map()


def _counts(stage: Stage, words: list[str]) -> None:
    _player(stage, words[0]).counts(Version(int(words[1])))


def _trickle(stage: Stage, words: list[str]) -> None:
    player = _player(stage, words[0])
    assert player.grant is not None, f"{player.name} has no read open"
    player.tell(ReadMeasured(player.grant.ticket, "link", "", "", 0, int(words[1])))


def _stick(stage: Stage, words: list[str]) -> None:
    _player(stage, words[0]).is_stuck = True


def _unstick(stage: Stage, words: list[str]) -> None:
    _player(stage, words[0]).unstick()


def _linger(stage: Stage, words: list[str]) -> None:
    _player(stage, words[0]).is_lingering = True


def _let_go(stage: Stage, words: list[str]) -> None:
    _player(stage, words[0]).lets_go()


def _slow(stage: Stage, words: list[str]) -> None:
    _player(stage, words[0]).is_copying_slow = True


def _copied(stage: Stage, words: list[str]) -> None:
    _player(stage, words[0]).copies_end()


def _spoil(stage: Stage, words: list[str]) -> None:
    _player(stage, words[0]).copies_end(Failure("corrupt-transfer", "chunk 1 is ??, which is not as published"))


def _stumble(stage: Stage, words: list[str]) -> None:
    failure = Failure("error", "copying to or from host memory failed")
    _player(stage, words[0]).copies_end(failure, next_is_slow=True)


def _free(stage: Stage, words: list[str]) -> None:
    _player(stage, words[0]).copies_end(Failure("usage", "the memory of 'w' was freed before it could be filled"))


def _prefetch(stage: Stage, words: list[str]) -> None:
    for player in _players(stage, words[0]):
        player.wish(int(words[1]) if words[1].isdigit() else words[1], player.worker.pins)
        stage.pump()


def _pin(stage: Stage, words: list[str]) -> None:
    for player in _players(stage, words[0]):
        player.wish(player.worker.prefetch, tuple(Version(int(word)) for word in words[1:]))
        stage.pump()


def _write(stage: Stage, words: list[str]) -> None:
    player = _player(stage, words[0])
    player.memory = [f"{words[1]}.{chunk}" for chunk in range(CHUNKS)]


# --- the link and time ------------------------------------------------------------------------------------------------


def _lanes(stage: Stage, words: list[str]) -> list[tuple[str, bool]]:
    ways = {"to-server": [True], "from-server": [False]}.get(words[1] if len(words) > 1 else "", [True, False])
    return [(_player(stage, words[0]).name, way) for way in ways]


def _hold(stage: Stage, words: list[str]) -> None:
    for lane in _lanes(stage, words):
        stage.held.setdefault(lane, [])


def _release(stage: Stage, words: list[str]) -> None:
    for lane in _lanes(stage, words):
        waiting = stage.held.pop(lane, [])
        for letter in waiting:
            stage.hand_over(letter, "  [late]")
            stage.pump()


def _pick(stage: Stage, words: list[str]) -> list[Letter]:
    """The n-th message that is held on a lane; all of them without a number."""
    (lane,) = _lanes(stage, words)
    letters = stage.held[lane]
    if len(words) == 2:
        found, stage.held[lane] = letters, []
        return found
    return [letters.pop(int(words[2]) - 1)]


def _deliver(stage: Stage, words: list[str]) -> None:
    for letter in _pick(stage, words):
        stage.hand_over(letter, "  [late]")


def _drop(stage: Stage, words: list[str]) -> None:
    for letter in _pick(stage, words):
        stage.lose(letter)


def _cut(stage: Stage, words: list[str]) -> None:
    for player in _players(stage, words[0]):
        stage.cut[player.name] = None


def _heal(stage: Stage, words: list[str]) -> None:
    for player in _players(stage, words[0]):
        del stage.cut[player.name]
        player.disconnected()
        stage.connect(player)


def _advance(stage: Stage, words: list[str]) -> None:
    stage.advance(_seconds(words[0]))


def _stall(stage: Stage, words: list[str]) -> None:
    stage.stall(_seconds(words[0]))


# --- looking ----------------------------------------------------------------------------------------------------------


def _state(stage: Stage, words: list[str]) -> None:
    stage.lines += state_of(stage)


def _memory(stage: Stage, words: list[str]) -> None:
    for player in _players(stage, words[0]):
        stage.say(content_of(player))


def _events(stage: Stage, _: list[str]) -> None:
    assert stage.server is not None, "no server is running"
    told = stage.server.state.events
    while told:
        event = told.popleft()
        cause = f" ({event.cause})" if isinstance(event, ReadMoved) else ""
        stage.say(f"{event.__struct_config__.tag}{cause}: {event.text}")


COMMANDS: dict[str, Callable[[Stage, list[str]], None]] = {
    "settings": _settings,
    "server": _server,
    "keep": _keep,
    "worker": _worker,
    "crash": _crash,
    "call": _call,
    "miss": _miss,
    "cancel": _cancel,
    "close": _close,
    "register": _register,
    "read": _read,
    "corrupt": _corrupt,
    "fail": _fail,
    "misfit": _misfit,
    "cannot-map": _cannot_map,
    "counts": _counts,
    "trickle": _trickle,
    "stick": _stick,
    "unstick": _unstick,
    "linger": _linger,
    "let-go": _let_go,
    "slow": _slow,
    "copied": _copied,
    "spoil": _spoil,
    "stumble": _stumble,
    "free": _free,
    "prefetch": _prefetch,
    "pin": _pin,
    "write": _write,
    "hold": _hold,
    "release": _release,
    "deliver": _deliver,
    "drop": _drop,
    "cut": _cut,
    "heal": _heal,
    "advance": _advance,
    "stall": _stall,
    "state": _state,
    "memory": _memory,
    "events": _events,
}
