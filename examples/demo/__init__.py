"""The demo: a training run that is killed in the middle of a save and goes on as if nothing had happened.

`python -m examples.demo` runs it, and `python -m examples.demo.train` is the training script alone.
"""
