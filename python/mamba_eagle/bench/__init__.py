"""What benchmarks share: clients, servers, batches in this process, rounds, result lines.

Nothing here imports mamba_eagle.eval, so evaluations can use these modules too.
"""
