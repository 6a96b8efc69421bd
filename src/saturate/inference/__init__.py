"""The fastest inference within an accuracy budget, proved: `saturate.optimize`.

    api            optimize(), load(), Budget: what a user calls
    source         the user's model and inputs, on their way to the candidates' processes
    worker         one candidate in a process of its own: applies techniques, runs, times itself, stores itself
    process        that process as the search sees it, with limits of time and memory
    racing         latency: interleaved blocks of calls in fresh pairs of processes
    accuracy       paired statistics: pass, fail, or undecided with the samples that are missing
    checking       the user's check on a candidate; controls of the check itself; behaviour guards
    repair         the most sensitive layers go back to the original precision
    search         which candidates, in which order, until when
    artifact       what is stored, and what loading it demands
    generation/    causal language models: prefill, decode, speculative decoding
    techniques/    one optimization per file; adding one edits no other file
    formats/       how a program is stored and loaded again: exported, AOTInductor, ONNX, TensorRT
"""
