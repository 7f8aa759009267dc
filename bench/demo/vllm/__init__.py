"""The main job with a real trainer and a real engine, on the CPU of one machine, with nothing downloaded.

    orchestrate ──┬── tensorhub serve          is killed and restarted late in the run
                  ├── trainer   (2 processes)  ranks of FSDP2 over gloo; both are killed, and refilled from the engines
                  └── engine    (2 and 1)      a vLLM in each process; one is killed, one joins late

What is learned, how samples travel, what is written down and how it is shown is that of the plain demo. Its own are the
policy (`model`: a Llama of transformers), its `trainer`, its `engine`, who starts and kills them (`director`), and the
proof that the engines computed with what was published (`judge`). The weights go through `integrations.fsdp` and
`integrations.vllm`, by the calls that any user has.

Nothing here is imported before `--engine vllm` is given.
"""
