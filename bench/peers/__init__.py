"""What a user could take instead, each as a program of two processes that needs nothing of TensorHub.

Run by path with whatever Python has the peer's package. The last line that a program prints is JSON: `seconds`,
`reader_cpu_s` and `source_cpu_s`, one figure for each transfer, and a `note`; or `error`, why it does not run here.
"""
