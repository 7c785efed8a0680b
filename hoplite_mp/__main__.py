"""`python -m hoplite_mp` is the command `hoplite-mp`."""

import sys

from hoplite_mp._cli.main import main

if __name__ == "__main__":
    sys.exit(main())
