"""Splits the bytes of one pipe into lines, and finds the output owner of each line.

A pipe is read in pieces that end anywhere. A line may be longer than the limit, lack an end, or be
cut off by a mark, after which the lines are for another output owner.
"""

from __future__ import annotations

from hoplite_mp._protocol.output import MARK_BYTES, mark_head

__all__ = ["LineSplitter", "Run"]

# Consecutive lines for one output owner.
Run = tuple[int, list[bytes]]


class LineSplitter:
    """The state of one pipe. `output_owner`: that of the bytes that are read next;
    `served`: all that marks have named."""

    def __init__(self, host_id: int, line_bytes_max: int, output_owner: int = 0) -> None:
        self.line_bytes_max = line_bytes_max
        self.output_owner = output_owner
        self.served: set[int] = set()
        self.rest = b""  # the beginning of a line whose end has not been read yet
        self._head = mark_head(host_id)

    def feed(self, data: bytes) -> list[Run]:
        """Takes bytes of the pipe. Returns the lines that are complete now, without line ends; a
        line that is too long is returned in pieces."""
        *lines, rest = (self.rest + data).split(b"\n")
        most = self.line_bytes_max
        runs: list[Run] = []
        if lines:
            if self._head in data or self._head in lines[0]:
                runs = self._by_output_owner(lines)
            else:
                runs = [(self.output_owner, lines)]
            if max(map(len, lines)) > most:
                runs = [(to, self._pieces(found)) for to, found in runs]
        # Keep MARK_BYTES at least, because the rest may end with the first bytes of a mark.
        if len(rest) >= most + MARK_BYTES:
            cut = (len(rest) - MARK_BYTES) // most * most
            pieces = [rest[at : at + most] for at in range(0, cut, most)]
            rest = rest[cut:]
            _append(runs, self.output_owner, pieces)
        self.rest = rest
        return runs

    def finish(self) -> list[Run]:
        """Returns what was read of a last line that has no end."""
        rest, self.rest = self.rest, b""
        return [(self.output_owner, self._pieces([rest]))] if rest else []

    def _by_output_owner(self, lines: list[bytes]) -> list[Run]:
        runs: list[Run] = []
        for line in lines:
            before, output_owner = self._marked(line)
            if output_owner is None:
                _append(runs, self.output_owner, [line])
                continue
            if before:
                _append(runs, self.output_owner, [before])
            self.output_owner = output_owner
            self.served.add(output_owner)
        return runs

    def _marked(self, line: bytes) -> tuple[bytes, int | None]:
        """Splits a line that ends with a mark into what was printed before the mark, and the mark's
        output owner; returns the whole line and None if there is no mark."""
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


def _append(runs: list[Run], output_owner: int, lines: list[bytes]) -> None:
    if runs and runs[-1][0] == output_owner:
        runs[-1][1].extend(lines)
    else:
        runs.append((output_owner, lines))
