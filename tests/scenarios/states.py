"""How things are on the stage, in a few lines."""

from tensorhub.protocol.messages import Filling

from .player import CHUNKS, Player
from .stage import Stage
from .words import buffer_text, call_text, copy_text, name_of


def content_of(player: Player) -> str:
    """The worker's memory, chunk by chunk."""
    return f"{player.name} has in memory: {player.content}"


def state_of(stage: Stage) -> list[str]:
    """Everybody's buffer, then what the server believes."""
    return [_player(player) for player in stage.players.values()] + _server(stage)


def _player(player: Player) -> str:
    worker = player.worker
    parts = [buffer_text(worker.buffer)]
    if isinstance(worker.buffer, Filling):
        parts[0] = f"filling {worker.buffer.version} ({player.done} of {CHUNKS})"
    if worker.call is not None:
        parts.append(f"in {call_text(worker.call.verb, worker.call.spec)}")
    if worker.state.memory.serving is not None:
        parts.append(f"serves {worker.state.memory.serving}")
    parts += [copy_text(copy) for copy in worker.state.copies.for_report()]
    if not worker.connected:
        parts.append("not connected")
    return f"{player.name}: {', '.join(parts)}"


def _server(stage: Stage) -> list[str]:
    server = stage.server
    if server is None:
        return ["server: none"]
    lines = ["server: listens only, after a restart" if server.state.is_recovering else "server: decides"]
    for name, model in sorted(server.state.models.items()):
        lines.append(f"{name}: latest is {model.latest}")
        for version, record in sorted(model.versions.items()):
            holders = [name_of(worker) for shard in sorted(record.holders) for worker in record.holders[shard]]
            exists = "is lost" if model.is_lost(record) else "exists" if record.exists else "does not exist (yet)"
            lines.append(f"version {version} {exists}; with {', '.join(holders) or 'nobody'}")
    for read in server.state.reads.all():
        void = ", void" if read.is_void else ""
        lines.append(
            f"open: {stage.words.ticket(read.ticket)}, {name_of(read.reader)} from {name_of(read.source)}{void}"
        )
    return lines
