"""The guest inside the user's process: finds the train step, answers the gate, applies techniques, records.

Nothing here imports anything but the standard library, the user's own torch, `saturate.techniques`, `saturate.records.facts` and the formulas of
`saturate.trace._matrix_costs`, which import nothing else. `inject/sitecustomize.py` wakes it when (and only when) the workload imports torch.
"""
