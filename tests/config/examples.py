"""Pieces of config files that several tests build on."""

#: a tier as the design has it; USER must be set
NVME = """\
[[tier]]
name = "nvme"
driver = "file"
path = "/local/$USER"
capacity = "400GiB"
survives = "reboot"
retain = { last = 3 }
"""
