"""Settings of the tcp transport, and the options of its sockets."""

import contextlib
import socket
import struct
from dataclasses import dataclass, field, replace

from ...protocol.errors import UsageError

# --- Everything that can be set about the tcp transport, and what a socket is told before it carries a byte.
#
# Each default shows its working. The figures were measured over loopback on 2 cores (AMD EPYC): they order the choices,
# they are not a promise about another machine.


MIB = 1 << 20
FAR_PROBE_S = 0.5  # a new stream takes some round trips of 50 ms to be as fast as it can
PORTS = 32  # from a port that was given: so many workers share a host
MAX_WANT_RANGES = 1024  # of one request: at most 20 bytes each in MessagePack, so always within MAX_WANT_BYTES


@dataclass(frozen=True)
class TcpSettings:
    """How one worker listens, connects and gives up."""

    # Addresses or interfaces, with commas between them: each is listened on. Open to other hosts only when asked for.
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port; else the first of `PORTS` that is free
    # "host" or "host:port" as peers see it, for each of the above; None: what `host` says, or the outward one
    advertise: str | None = None
    leave_from: tuple[str, ...] = ()  # this worker's own addresses, for sources that have as many
    try_s: float = 1.5  # for the first of several addresses to answer: a lost SYN is sent again after 1 s
    # shared secret that a reader must show; None: every host that can connect may read
    token: str | None = field(default=None, repr=False)
    expect_s: float = 2.0  # for a key that is not there yet: a reader may be told of a source that only just starts
    silence_s: float = 5.0  # the keepalive comes every 1.25 s: three may be lost to a GC or a stopped machine
    greet_s: float = 1.0  # for a reader to greet, which it does at once: its first words may be sent twice
    connect_s: float = 5.0  # a lost SYN is sent again after 1 s and after 3 s; 2 s spare
    streams: int = 2  # two idle cores: 1 stream 6.8 GiB/s, 2 streams 10.3, 4 no more
    stream_bytes: int = 8 * MIB  # four times what a further stream's connection costs (0.3 ms, which is 2 MiB)
    # A link of 10 Gbit/s gives 1.2e9: one stream that gets less is held up by its link, and a second would only make
    # every chunk take twice as long. 0: all streams at once, as a thin long path across sites wants it.
    stream_rate_bytes_per_s: float = 1e9
    # Between sites, all at once: over 50 ms and 1 Gbit/s one got 236 Mbit/s, eight 751; but each has a chunk in flight,
    # which is read again where a site's seed dies.
    far_streams: int = 4
    # Of a read that gets more from each doubling (`StreamCount`): where the path limits each stream, as clouds do to 5
    # Gbit/s and a long round trip does to its window.
    max_streams: int = 8
    # What comes slower inside a site is held up by its link; 5 Gbit/s, to which clouds limit one stream, are 6.2e8.
    probe_rate_bytes_per_s: float = 5e8
    probe_s: float = 0.25  # in which a rate is measured: five looks
    # 32 direct readers with 2 streams; selection builds chains long before. Unauthenticated ones do not count.
    max_connections: int = 64
    # From here on a source lends its memory, and copies nothing: what is on its way, 36 MiB at most, is then with its
    # reader within 36 ms, so that no withdrawal waits long for it.
    lend_rate_bytes_per_s: float = 1e9
    lend_piece_bytes: int = 1 << 16  # smaller pieces on the average are copied: each costs a reference to its pages
    # BBR paces loopback and a LAN down by a third; "bbr" across sites; None: the kernel's
    congestion: str | None = "cubic"
    send_buffer_bytes: int | None = None  # None: the kernel tunes it itself (tcp_wmem)
    receive_buffer_bytes: int | None = None  # None: the kernel tunes it itself (tcp_rmem)
    ahead_s: float = 0.25  # chunks asked for ahead of their arrival: a WAN's round trip, and no more disorder than that
    ahead_bytes: int = 64 * MIB  # and never more than this: 0.25 s of a stream of 2 Gbit/s
    withdraw_grace_s: float = 0.1  # a chunk of 4 MiB at 1 Gbit/s takes 34 ms: its reader is told why

    def __post_init__(self) -> None:
        sizes = ("streams", "far_streams", "max_streams", "probe_s", "stream_bytes", "ahead_bytes", "max_connections")
        for name in ("silence_s", "greet_s", "connect_s", "ahead_s", *sizes):
            if getattr(self, name) <= 0:
                raise UsageError(f"tcp transport: {name} is {getattr(self, name)}, but must be more than 0")

    def across_sites(self) -> "TcpSettings":
        """Settings for a path between sites, which one stream does not fill."""
        streams = max(self.streams, self.far_streams)
        return replace(
            self,
            streams=streams,
            stream_bytes=min(self.stream_bytes, MIB),
            stream_rate_bytes_per_s=0.0,
            probe_rate_bytes_per_s=0.0,
            probe_s=max(self.probe_s, FAR_PROBE_S),
        )

    @property
    def max_greeting_s(self) -> float:
        """How long a source waits for the greeting of a new connection."""
        return min(self.greet_s, self.silence_s)

    @property
    def patience_s(self) -> float:
        """How long a source bears a reader that neither takes a byte nor asks for one."""
        return self.silence_s * 4


def tune(sock: socket.socket, settings: TcpSettings) -> None:
    """Options of every data socket. What the kernel does not permit is left as it is: it costs speed, not truth."""
    tcp = socket.IPPROTO_TCP
    options: list[tuple[int, int, int]] = [
        (tcp, socket.TCP_NODELAY, 1),  # a request for more chunks must not wait for company
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),  # second defence: a host that vanished while both sides waited
    ]
    if settings.send_buffer_bytes is not None:
        options.append((socket.SOL_SOCKET, socket.SO_SNDBUF, settings.send_buffer_bytes))
    if settings.receive_buffer_bytes is not None:
        options.append((socket.SOL_SOCKET, socket.SO_RCVBUF, settings.receive_buffer_bytes))
    for name, value in (
        ("TCP_KEEPIDLE", max(1, round(settings.silence_s))),
        ("TCP_KEEPINTVL", max(1, round(settings.silence_s))),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", round(4000 * settings.patience_s)),  # ms; ours ends after thrice the patience at most:
        # twice it goes by in one call of `splice` that moves something, and once more in the next
    ):
        if hasattr(socket, name):
            options.append((tcp, getattr(socket, name), value))
    for level, option, value in options:
        with contextlib.suppress(OSError):
            sock.setsockopt(level, option, value)
    if settings.congestion is not None and hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):
            sock.setsockopt(tcp, socket.TCP_CONGESTION, settings.congestion.encode())


def limit_waits(sock: socket.socket, *, receive_s: float, send_s: float) -> None:
    """Let the kernel end a wait in a blocking socket: Python's own timeouts would poll before each call."""
    for option, limit_s in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
        microseconds = max(1000, round(limit_s * 1e6))  # 0 would mean for ever
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", *divmod(microseconds, 1_000_000)))
