"""Physically smaller models: which widths of a model belong together, which of them matter least, and how they are cut.

    tracing       one forward, recorded operation by operation; what the outputs do not depend on is dropped
    labels        indices of dimensions that must go together (union-find)
    rules         how each operation ties the dimensions of what it reads and writes
    groups        dimensions that can be cut, as classes of indices; how many of them to keep
    importance    which classes matter least
    attention     nn.MultiheadAttention with fewer heads than its embedding has room for
    surgery       cutting parameters, buffers and the attributes that describe them; all of it can be taken back
    shrink        the whole: a copy of a model with smaller layers, every cut proved on the way
    values        tensors inside nested inputs and outputs

The analysis may be wrong about code that nobody here has seen, so nothing rests on it alone: a cut stays only if the
model without these indices computes what the model with zeros in their place computes.
"""
