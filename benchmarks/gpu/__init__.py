"""What stepwell does on a real GPU, against what that GPU and its disk can do: `python -m benchmarks.gpu --help`."""
