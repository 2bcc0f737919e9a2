import os
import shlex

from setuptools import Extension, setup

flags = ["-std=c11", "-O3", "-g1", "-Wall", "-Wextra", "-fvisibility=hidden"]
if os.environ.get("STEPWELL_WERROR") == "1":
    flags.append("-Werror")
flags += shlex.split(os.environ.get("STEPWELL_CFLAGS", ""))  # sanitizers, as in native/build_ffi.py

setup(
    cffi_modules=["native/build_ffi.py:ffibuilder"],
    ext_modules=[
        Extension(  # cffi's functions let go of the interpreter; these hold on to it
            "stepwell.native._objects",
            ["native/objects.c", "native/glances.c", "native/metadata.c"],
            depends=["native/objects.h"],
            extra_compile_args=flags,
            extra_link_args=shlex.split(os.environ.get("STEPWELL_LDFLAGS", "")),
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
