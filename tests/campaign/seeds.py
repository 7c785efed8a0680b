"""Programs that have found something once, so they are played for ever, with what that was."""

ONE_HOST: dict[tuple[int, str], str] = {}
