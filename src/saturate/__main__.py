"""`python -m saturate`: the command where it is not on the PATH."""

import sys

from saturate.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
