"""Splits the bytes of one pipe into lines, and tells for which audience each is.

Why it exists: a pipe is read in pieces that end anywhere; a line may be longer than anybody wants
to keep, lack an end, or be cut off by a mark that says that another audience follows.
It must never know: descriptors, sockets, where lines go.
"""

from __future__ import annotations

from hoplite_mp.protocol.output import MARK_BYTES, mark_head

__all__ = ["Lines", "Run"]

# Consecutive lines for one audience.
Run = tuple[int, list[bytes]]


class Lines:
    """The state of one pipe. `audience` is that of the next bytes."""

    def __init__(self, home: int, line_bytes_max: int, audience: int = 0) -> None:
        self.line_bytes_max = line_bytes_max
        self.audience = audience
        self.rest = b""  # the beginning of a line whose end has not come
        self._head = mark_head(home)

    def feed(self, data: bytes) -> list[Run]:
        """The lines that are complete now, without line ends; a line that is too long is given in
        pieces."""
        *lines, rest = (self.rest + data).split(b"\n")
        most = self.line_bytes_max
        runs: list[Run] = []
        if lines:
            if self._head in data or self._head in lines[0]:
                runs = self._by_audience(lines)
            else:
                runs = [(self.audience, lines)]
            if max(map(len, lines)) > most:
                runs = [(to, self._pieces(found)) for to, found in runs]
        # The part that is kept may end with the first bytes of a mark.
        if len(rest) >= most + MARK_BYTES:
            cut = (len(rest) - MARK_BYTES) // most * most
            pieces = [rest[at : at + most] for at in range(0, cut, most)]
            rest = rest[cut:]
            _append(runs, self.audience, pieces)
        self.rest = rest
        return runs

    def finish(self) -> list[Run]:
        """What has come of a last line that has no end."""
        rest, self.rest = self.rest, b""
        return [(self.audience, self._pieces([rest]))] if rest else []

    def _by_audience(self, lines: list[bytes]) -> list[Run]:
        runs: list[Run] = []
        for line in lines:
            before, audience = self._marked(line)
            if audience is None:
                _append(runs, self.audience, [line])
                continue
            if before:
                _append(runs, self.audience, [before])
            self.audience = audience
        return runs

    def _marked(self, line: bytes) -> tuple[bytes, int | None]:
        """Splits off a mark, which ends its own line, and the line before it if that had no end."""
        at = len(line) - MARK_BYTES
        if at < 0 or not line.startswith(self._head, at):
            return line, None
        try:
            return line[:at], int(line[at + len(self._head) :], 16)
        except ValueError:  # the program has printed something that resembles a mark
            return line, None

    def _pieces(self, lines: list[bytes]) -> list[bytes]:
        most = self.line_bytes_max
        found: list[bytes] = []
        for line in lines:
            found += [line[at : at + most] for at in range(0, len(line), most)] or [line]
        return found


def _append(runs: list[Run], audience: int, lines: list[bytes]) -> None:
    if runs and runs[-1][0] == audience:
        runs[-1][1].extend(lines)
    else:
        runs.append((audience, lines))
