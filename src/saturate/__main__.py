"""`python -m saturate`: the command where it is not on the PATH."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]         # the working directory: what lies there is the command's, and is not to run in here

    from saturate.cli.main import main

    sys.exit(main())
