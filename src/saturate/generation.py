"""`saturate.generation` under the name that is imported: the package `saturate.inference.generation`."""

import sys

from saturate.inference import generation

sys.modules[__name__] = generation
