"""Lines out of the bytes of one pipe, and for whom they are.

Why it exists: a pipe is read in pieces that end anywhere; a line may be longer than anybody wants
to keep, have no end, or be cut off by a mark that says that another audience begins.
It must never know: descriptors, sockets, where lines go.
"""

from __future__ import annotations

from hoplite_mp.protocol.output import MARK_BYTES, mark_head

__all__ = ["Lines", "Run"]

# Lines one after another for one audience.
Run = tuple[int, list[bytes]]


class Lines:
    """What has come through one pipe. `audience`: of what comes next."""

    def __init__(self, home: int, line_bytes_max: int, audience: int = 0) -> None:
        self.line_bytes_max = line_bytes_max
        self.audience = audience
        self.rest = b""  # the beginning of a line
        self._head = mark_head(home)

    def feed(self, data: bytes) -> list[Run]:
        """The lines that are complete now, without their ends; pieces of one that is too long."""
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
        if len(rest) >= most + MARK_BYTES:  # what is kept may end with a mark's first bytes
            cut = (len(rest) - MARK_BYTES) // most * most
            pieces = [rest[at : at + most] for at in range(0, cut, most)]
            rest = rest[cut:]
            _append(runs, self.audience, pieces)
        self.rest = rest
        return runs

    def finish(self) -> list[Run]:
        """What has come of a line that has no end."""
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
        """A mark ends its line, and the line before it if that had no end."""
        at = len(line) - MARK_BYTES
        if at < 0 or not line.startswith(self._head, at):
            return line, None
        try:
            return line[:at], int(line[at + len(self._head) :], 16)
        except ValueError:  # a program has printed what it has read of marks
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
