"""How fast TensorHub is, beside what a user would otherwise take. `python -m bench --help`; docs/benchmarks.md.

Rules:
1. Contestants take turns within a round, in an order that changes; several rounds; medians with smallest and largest.
2. Everything runs in real processes, and every target is compared with its source after every transfer.
3. What does not run here is named with its reason, never left out.
4. Every wait has a deadline, and no process or namespace is left behind.

It must never: assert a speed. A goal that is missed is a line in the report, not a failure.
"""
