"""The fastest inference within an accuracy budget, proved: `saturate.optimize`.

What a user calls
    api             optimize(), load()
    result          what it returns
    scores          what the check returned
    accuracy        Budget; paired statistics: pass, fail, or undecided with the samples that are missing

The search
    plan            which candidates, in which order
    search          what becomes of each; the best so far
    confirm         the winner: stored, loaded again, scored on other samples, raced
    serving         batch sizes and processes, where throughput is the objective
    repair          the most sensitive layers (`sensitivity`) go back to the original precision
    racing          blocks of calls in fresh pairs of processes
    lab             the machine as the search sees it
    tried           one candidate and what is known of it
    journal         what was found so far, on disk
    leftovers       what a killed search has left there

A candidate
    candidates      techniques with options
    called          what the user gave as a model
    source          that and its inputs on their way to a process of its own
    worker          that process: applies techniques, runs, times itself, stores itself
    process         the same from outside, with limits of time and memory
    session         torch's switches that hold for a process: the user's, and those of techniques
    gpu_failures    what is left of its GPU when a call has failed there
    device_memory   what it takes of a GPU's memory
    checking        the user's check on it
    controls        can that check judge at all?
    guards          does it behave as the model does?
    here            does it answer in the user's process as in one of its own?
    samples         names for samples, to find those that the check scores among others
    users_code      the user's functions in this process: what they raise, what they fork

artifact            what is stored, and what loading it demands
techniques/         one optimization per file; adding one edits no other file
formats/            how a program is stored and loaded again: exported, AOTInductor, ONNX, TensorRT
pruning/            which channels and heads belong together, and how they are taken out
generation/         causal language models: prefill, decode, speculative decoding
"""
