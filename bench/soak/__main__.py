"""`python -m bench.soak`."""

import sys

from bench.soak.command import main

if __name__ == "__main__":
    sys.exit(main())
