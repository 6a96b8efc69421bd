"""saturate makes an unmodified AI workload use its hardware fully, and proves it.

Importing this package imports neither torch nor any third-party library: it is also loaded inside the user's own
process, next to whatever lives there (see `saturate.agent`).
"""

__version__ = "0.1.0"
