"""The demo: checkpoints on three tiers, and a training run that is killed twice and goes on as if nothing had happened.

`python -m examples.demo` runs it, and `python -m examples.demo.train` is the training script alone.
"""
